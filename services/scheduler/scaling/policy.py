"""How many replicas are wanted. Pure: signals and the state before in, the state after out; no I/O, no clock.

    need    = work / utilisation[role] * boost * coming     in replicas, for each shard group and role by itself
    wanted  = highest need of the last --scale-down-after seconds, rounded up, within the bounds; for fewer replicas
              than now they must be used a quarter less than that

``work`` says how many replicas would just do the work, however many there are (:class:`Load`), so what is wanted stays
the same while replicas start; more replicas come at once, fewer only when fewer have sufficed for a while. ``boost``
follows the latencies: where the 90th percentile misses its target, the cause of that gets as many more replicas as the
latency is too high, once those wanted are there and had time to show what they change; the boost fades while latencies
are well below their targets, or requests are few. ``coming``, for shard groups: how many times the ready attention
workers are needed for the load; those that start bring as much more work, and seats take as long to start. Where
signals are missing, the wanted number stays or rises.
Without requests for ``sleep_after_s`` no shard groups and no attention workers are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.metrics.scheduler import ScalingReason
from services.scheduler.scaling.signals import Load, Signals
from services.scheduler.scaling.targets import Bounds, ScaledRole, ScalingOptions, Target

UTILISATION: Mapping[ScaledRole, float] = {"experts": 0.7, "attention": 0.8, "gateway": 0.6}
"""Share of the time that a seat computes, of an attention worker's places, of a gateway's core."""
TOLERANCE = 0.1
"""A need that is no further above a whole number of replicas is not rounded up."""
ROOMY = 0.75
"""Fewer replicas are wanted only where they would have this share of the utilisation: work that fewer do takes longer,
and more of it is under way at a time."""
MAX_COMING = 3.0
"""Limit of the factor on work that more attention workers may bring."""
MAX_BOOST = 4.0
"""A latency that no number of replicas can meet costs at most this many times what the load needs."""
MAX_RATIO = 2.0
REACTION_S = 45.0
"""How long replicas that came or went need before latencies show whether they suffice."""
COMFORTABLE = 0.8
"""Latency in targets below which a boost fades; between this and 1 it stays."""
BOOST_HALF_LIFE_S = 120.0
STALLED, MOSTLY_STALLED = 0.2, 0.5
"""Share of steps spent waiting for a shard group from which on it is the cause of TPOT, and of TTFT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What is remembered of one target. ``highest``: (time, replicas) with falling replicas, each the maximum of those
    that came later, within the window."""

    highest: tuple[tuple[float, int], ...] = ()
    boost: float = 1.0
    need: float = 0.0
    ready: int = 0
    reason: ScalingReason = "hold"
    """Why :attr:`wanted` is what it is."""
    came_at: float = -math.inf
    """When the ready replicas changed, fewer were wanted, or a boost rose: earlier latencies do not count."""

    @property
    def wanted(self) -> int:
        return self.highest[0][1] if self.highest else 0

    def later(self, seconds: float) -> Course:
        """Return the same, ``seconds`` later."""
        highest = tuple((at + seconds, replicas) for at, replicas in self.highest)
        return replace(self, highest=highest, came_at=self.came_at + seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state after a decision. :meth:`starting` makes the first one."""

    at: float
    active_at: float
    courses: Mapping[Target, Course] = field(default_factory=dict)
    asleep: bool = False

    @classmethod
    def starting(cls, at: float, targets: Mapping[Target, int]) -> State:
        """Return the state of a new leader: ``targets`` stay until fewer have sufficed for long enough."""
        courses = {target: Course(highest=((at, wanted),)) for target, wanted in targets.items()}
        model = [course.wanted for target, course in courses.items() if target.sleeps]
        return cls(at=at, active_at=at, courses=courses, asleep=bool(model) and not any(model))

    def at_rest(self, at: float) -> State:
        """Return the state where the time since this one does not count."""
        rest = at - self.at
        courses = {target: course.later(rest) for target, course in self.courses.items()}
        return replace(self, at=at, active_at=self.active_at + rest, courses=courses)

    @property
    def targets(self) -> dict[Target, int]:
        """Replicas wanted."""
        return {
            target: 0 if self.asleep and target.sleeps else course.wanted for target, course in self.courses.items()
        }

    @property
    def reasons(self) -> dict[Target, ScalingReason]:
        """Why these replicas are wanted."""
        return {
            target: "asleep" if self.asleep and target.sleeps else course.reason
            for target, course in self.courses.items()
        }


def decide(signals: Signals, state: State, options: ScalingOptions) -> State:
    """Return the next state; its :attr:`State.targets` are wanted from ``signals.at`` on.

    A target without a load in ``signals`` keeps what it had.
    """
    active_at = signals.at if signals.active else state.active_at
    idle_s = signals.at - active_at
    may_sleep = options.sleep_after_s > 0 and not signals.active
    asleep = may_sleep and (state.asleep or idle_s >= options.sleep_after_s)
    causes, incurable = _causes(signals, state, options)
    calm = _comfortable(signals)
    courses, coming = dict(state.courses), 1.0
    for target, load in sorted(signals.loads.items(), key=lambda item: item[0].role != "attention"):
        before = state.courses.get(target, Course())
        if state.asleep and not asleep and target.sleeps:
            before = Course()  # what was wanted before the model fell asleep does not count
        fading_s = signals.at - state.at if calm or (incurable and target.role == "attention") else 0.0
        boosted = _boosted(before, load, target, causes.get(target), signals.at, fading_s)
        courses[target] = _next(boosted, load, target, signals.at, options, coming if target.role == "experts" else 1.0)
        if target.role == "attention":
            coming = max(1.0, min(MAX_COMING, load.work / UTILISATION["attention"] / max(1, load.ready)))
    return State(at=signals.at, active_at=active_at, courses=courses, asleep=asleep)


def _next(course: Course, load: Load, target: Target, at: float, options: ScalingOptions, coming: float) -> Course:
    """Return ``course`` with the need of this moment; ``coming`` is the factor by which the work will grow."""
    need = load.work / UTILISATION[target.role] * course.boost * coming
    if load.useful is not None:
        need = min(need, math.ceil(load.useful * coming))
    bounds = options.bounds_of(target)
    enough = replicas = bounds.clamp(math.ceil(need - TOLERANCE))
    if replicas < course.wanted:
        replicas = min(course.wanted, bounds.clamp(math.ceil(need / ROOMY - TOLERANCE)))
    unknown = not load.known and replicas < course.wanted
    if unknown:
        replicas = course.wanted
    recent = [(then, many) for then, many in course.highest if then > at - options.down_after_s and many > replicas]
    highest = (*recent, (at, replicas))
    changed = load.ready != course.ready or highest[0][1] < course.wanted
    came_at = at if changed else course.came_at
    wanted = highest[0][1]
    reason: ScalingReason = "unknown" if unknown and wanted == replicas else "hold"
    if wanted == enough:
        reason = _reason(need, course.boost, bounds)
    return Course(highest=highest, boost=course.boost, need=need, ready=load.ready, reason=reason, came_at=came_at)


def _reason(need: float, boost: float, bounds: Bounds) -> ScalingReason:
    """Return why as many replicas are wanted as ``need`` asks for, within ``bounds``."""
    asked = math.ceil(need - TOLERANCE)
    if asked < bounds.minimum:
        return "floor"
    if asked > bounds.maximum:
        return "ceiling"
    return "latency" if bounds.clamp(math.ceil(need / boost - TOLERANCE)) < asked else "load"


def _boosted(course: Course, load: Load, target: Target, ratio: float | None, at: float, fading_s: float) -> Course:
    """Return ``course`` with the boost that latencies ask for. ``ratio``: the worst latency that ``target`` causes,
    over its target. None: it causes none, and its boost fades for ``fading_s``."""
    boost, came_at = course.boost, course.came_at
    base = load.work / UTILISATION[target.role]
    if ratio is not None:
        stable = load.ready >= course.wanted and load.ready == course.ready
        if stable and base > 0 and at - came_at >= REACTION_S:
            wished = load.ready * min(ratio, MAX_RATIO) / base
            if wished > boost:
                boost, came_at = min(MAX_BOOST, wished), at
    else:
        boost = 1.0 + (boost - 1.0) * 0.5 ** (fading_s / BOOST_HALF_LIFE_S)
    return Course(highest=course.highest, boost=boost, need=course.need, ready=course.ready, came_at=came_at)


def _comfortable(signals: Signals) -> bool:
    """Say whether latencies are well below their targets, or few requests come and they end. It is not known where many
    are stuck, or gateways do not report."""
    ratios = [ratio for ratio in (signals.ttft, signals.tpot) if ratio is not None]
    if ratios:
        return max(ratios) < COMFORTABLE
    gateways = signals.loads.get(Target("gateway"))
    return (signals.few or not signals.active) and gateways is not None and gateways.known


def _causes(signals: Signals, state: State, options: ScalingOptions) -> tuple[dict[Target, float], bool]:
    """Return what causes latencies above their targets, and these latencies in targets; and whether there is one that
    only groups which have their maximum could cure."""
    attention = Target("attention")
    if attention not in signals.loads:
        return {}, False
    groups = [target for target in signals.loads if target.role == "experts"]
    groups.sort(key=lambda target: (-signals.loads[target].stall, target.shard or 0))
    at_maximum = [group for group in groups if _wanted(group, state) >= options.bounds_of(group).maximum]
    full = sum(signals.loads[group].stall for group in at_maximum)
    causes: dict[Target, float] = {}
    incurable = False
    for ratio, stalled in ((signals.tpot, STALLED), (signals.ttft, MOSTLY_STALLED)):
        if ratio is None or ratio <= 1:
            continue
        waited_for = [group for group in groups if signals.loads[group].stall >= stalled]
        target = _cure(waited_for, full, signals, state, options)
        if target is not None:
            causes[target] = max(ratio, causes.get(target, 0.0))
        incurable |= target is None
    return causes, incurable


def _cure(
    waited_for: Sequence[Target], full: float, signals: Signals, state: State, options: ScalingOptions
) -> Target | None:
    """Return the target of which more replicas help: the first of ``waited_for`` (the longest wait first) that may have
    more with something to do, or else attention. None: groups that have their maximum take most of a step (``full`` is
    their share), so that more attention workers would wait for the same seats."""
    for group in waited_for:
        wanted, useful = _wanted(group, state), signals.loads[group].useful
        if wanted < options.bounds_of(group).maximum and (useful is None or wanted < useful):
            return group
    return None if full >= MOSTLY_STALLED else Target("attention")


def _wanted(target: Target, state: State) -> int:
    return state.courses.get(target, Course()).wanted
