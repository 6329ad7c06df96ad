"""One target for attention and experts, where each replica of attention holds seats. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.scheduler.scaling.policy import UTILISATION
from services.scheduler.scaling.signals import Signals
from services.scheduler.scaling.targets import Target


def together(signals: Signals, seats_of: Callable[[int], float]) -> Signals:
    """Return ``signals`` with one target for attention and experts; its work is that of whichever needs more replicas.

    Args:
        seats_of: seats of the shard group with this number in each replica.
    """
    groups = {target: load for target, load in signals.loads.items() if target.role == "experts"}
    attention = signals.loads[Target("attention")]
    meant_for = UTILISATION["attention"] / UTILISATION["experts"]
    work = [load.work / seats_of(target.shard or 0) * meant_for for target, load in groups.items()]
    joined = replace(
        attention,
        work=max([attention.work, *work]),
        known=attention.known and all(load.known for load in groups.values()),
    )
    others = {target: load for target, load in signals.loads.items() if target not in groups}
    return replace(signals, loads=others | {Target("attention"): joined})
