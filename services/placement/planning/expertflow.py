"""ExpertFlow's parallelization plan: which kinds of parallelism a machine uses (section 3.3, equations 3.1 to 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """The kinds of parallelism that :func:`parallel_plan` decides on.

    ``data``, ``expert``: equations 3.1 and 3.2 hold. ``pipeline``: stages of several batches may overlap (3.3).
    ``blocks``: blocks of fused experts a layer has; ``blocks_per_device``: the most of them on one device.
    """

    data: bool
    expert: bool
    blocks: int
    blocks_per_device: int
    pipeline: bool


def parallel_plan(P: int, D: int, E_total: int, E_block: int) -> ParallelPlan:
    """Return a plan for ``P`` in-flight batches on ``D`` devices, ``E_total`` experts a layer in blocks of ``E_block``.

    - data parallelism   <=>  P > 1 and D > 1 (3.1)
    - expert parallelism <=>  E_total > E_block and D > 1 (3.2)
    - pipeline parallelism ==> P > D (3.3): a necessary condition, so ``pipeline`` says that it can occur

    Example: ``parallel_plan(8, 4, 64, 8)`` has 8 blocks, 2 on each device, and all three kinds.

    Raises:
        ConfigError: one of the four is below 1.
    """
    for name, value in {"P": P, "D": D, "E_total": E_total, "E_block": E_block}.items():
        if value < 1:
            raise ConfigError(f"A parallel plan with {name} = {value} cannot be.", hint=f"{name} is 1 or more.")
    blocks = -(-E_total // E_block)
    return ParallelPlan(
        data=P > 1 and D > 1,
        expert=E_total > E_block and D > 1,
        blocks=blocks,
        blocks_per_device=-(-blocks // D),
        pipeline=P > D,
    )
