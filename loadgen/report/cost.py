"""What a run took of GPUs, and what its tokens cost: from the number of GPUs and their price, which the user gives."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.results import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """``price``: of a GPU for an hour, in the user's currency; None where it was not given."""

    gpus: float
    gpu_hours: float
    output_tokens_per_gpu_hour: float
    price: float | None = None

    @property
    def of_run(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours

    @property
    def per_million_output_tokens(self) -> float | None:
        """None also where no token came."""
        if self.price is None or not self.output_tokens_per_gpu_hour:
            return None
        return 1e6 * self.price / self.output_tokens_per_gpu_hour


def cost(run: Run) -> Cost | None:
    """Returns the cost of ``run``; None where the number of GPUs was not given."""
    gpus, price = run.settings.get("gpus"), run.settings.get("price_per_gpu_hour")
    if not isinstance(gpus, int | float) or gpus <= 0:
        return None
    return Cost(
        gpus=float(gpus),
        gpu_hours=gpus * run.duration_s / 3600,
        output_tokens_per_gpu_hour=3600 * run.rates.output_tokens / gpus,
        price=float(price) if isinstance(price, int | float) else None,
    )
