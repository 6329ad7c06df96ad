"""How evenly tenants are served."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.results import Fairness, Group


def jain(values: Sequence[float]) -> float:
    """Returns Jain's index: 1 if all are equal, 1/n if one has all.

    >>> jain([1.0, 1.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness(tenants: Sequence[Group]) -> Fairness | None:
    """Returns how evenly ``tenants`` were served, by their weights; None of fewer than two."""
    if len(tenants) < 2:
        return None
    served = [tenant.rates.output_tokens / tenant.weight for tenant in tenants]
    waits = [tenant.latency["ttft"].mean_ms for tenant in tenants if "ttft" in tenant.latency]
    slowdown = jain(waits) if len(waits) == len(tenants) else None
    return Fairness(tenants=len(tenants), index=jain(served), slowdown=slowdown)
