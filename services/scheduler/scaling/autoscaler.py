"""Scaling by the leader: reads the loads, decides, shows the targets and keeps them for the next leader."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.queue.loads import LoadReader
from services.queue.scheduler_side import SchedulerQueue
from services.queue.seats import SeatRegistry
from services.scheduler.scaling.meter import GroupReading, Meter, Reading
from services.scheduler.scaling.policy import State, decide
from services.scheduler.scaling.signals import Signals
from services.scheduler.scaling.targets import ReplicaCounts, ScalingOptions, Target, pack_targets, unpack_targets
from services.scheduler.scaling.together import together

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A decision and what it follows from, for series."""

    state: State
    signals: Signals
    groups: Mapping[int, GroupReading]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Sources of loads. ``counts`` None: the replicas that are set are not known."""

    queue: SchedulerQueue
    registry: SeatRegistry
    loads: LoadReader
    counts: ReplicaCounts | None = None


class Autoscaler:
    """Scales during one term. ``groups``: how many shard groups there are at least; ``on_decision``: is called with
    each decision."""

    def __init__(
        self,
        sources: Sources,
        options: ScalingOptions,
        *,
        groups: int,
        lease_s: float,
        on_decision: Callable[[Decision], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._options = sources, options
        self._meter = Meter(groups=groups, lease_s=lease_s, ranks=options.ranks)
        self._on_decision = on_decision
        self._clock = clock
        self._state: State | None = None

    async def turn(self, epoch: int) -> None:
        """Read, decide and keep the targets; while the model sleeps, they stay as they are.

        Raises:
            StaleLeader: another scheduler leads.
            QueueUnavailable: Redis does not answer.
        """
        if await self._sources.queue.sleep_level():
            # what waits in the queue waits for a wake-up, and nothing that runs is idle for want of requests
            self._state = self._state and self._state.at_rest(self._clock())
            return
        reading = await self._read()
        signals = self._meter.signals(reading)
        if self._options.groups is not None:
            signals = together(signals, self._options.seats_of)
        before = self._state or await self._inherited(reading)
        state = decide(signals, before, self._options)
        if self._state is None or state.targets != before.targets:
            self._log(before.targets, state.targets)
            await self._sources.loads.keep_targets(epoch, pack_targets(state.targets, self._options.ranks))
        self._state = state
        self._on_decision(Decision(state=state, signals=signals, groups=dict(self._meter.groups)))

    async def _read(self) -> Reading:
        sources = self._sources
        return Reading(
            seats=await sources.registry.seats(),
            workers=await sources.queue.workers(),
            loads=await sources.loads.loads(),
            depth=await sources.queue.depth(),
            counts=sources.counts.counts() if sources.counts else None,
            at=self._clock(),
        )

    async def _inherited(self, reading: Reading) -> State:
        """Return the state to start from: what the last leader wanted or what is set, whichever is more, as either may
        be old. Where neither is known, it is what is registered. All is within the bounds, but for what sleeps."""
        kept = unpack_targets(await self._sources.loads.targets(), self._options.ranks)
        asked = {target: replicas.wanted for target, replicas in (reading.counts or {}).items()}
        known = {target: max(kept.get(target, 0), asked.get(target, 0)) for target in kept.keys() | asked.keys()}
        found = _registered(reading, self._options.ranks) | known
        wanted = {
            target: many and self._options.bounds_of(target).clamp(many)
            for target, many in found.items()
            if self._options.decides(target)
        }
        return State.starting(reading.at, wanted)

    def _log(self, before: Mapping[Target, int], now: Mapping[Target, int]) -> None:
        for target, wanted in now.items():
            if before.get(target) != wanted:
                log.info("%s: desired replicas %d (were %s)", target.name, wanted, before.get(target, "none"))


def _registered(reading: Reading, ranks: int) -> dict[Target, int]:
    """Return registered replicas by target, without targets that have none: these may sleep, or start."""
    groups = [seat.report.group for seat in reading.seats if seat.report.group is not None]
    found = {Target("experts", group): groups.count(group) for group in set(groups)}
    found[Target("attention")] = -(-len(reading.workers) // ranks)
    found[Target("gateway")] = len(reading.loads.gateways)
    return {target: count for target, count in found.items() if count}
