"""How many replicas are wanted, given signals: rules one by one, and properties of all."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.scaling import Bounds, Load, ScalingOptions, Signals, State, Target, decide
from services.scheduler.scaling.policy import REACTION_S, UTILISATION

OPTIONS = ScalingOptions(
    bounds={
        "experts": Bounds(minimum=1, maximum=6),
        "attention": Bounds(minimum=1, maximum=6),
        "gateway": Bounds(minimum=2, maximum=4),
    },
    down_after_s=60.0,
)
SLEEPY = replace(OPTIONS, sleep_after_s=30.0)
HOT, COLD = Target("experts", 0), Target("experts", 1)
ATTENTION, GATEWAY = Target("attention"), Target("gateway")
ALL = (HOT, COLD, ATTENTION, GATEWAY)
START = State.starting(0.0, {HOT: 1, COLD: 1, ATTENTION: 1, GATEWAY: 2})


def at(
    time: float,
    work: Mapping[Target, float] | None = None,
    *,
    ready: Mapping[Target, int] | None = None,
    active: bool = True,
    unknown: Sequence[Target] = (),
    stall: Mapping[Target, float] | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    useful: int | None = None,
    few: bool = False,
) -> Signals:
    """Little work everywhere, but for ``work``."""
    given_work, there, stalls = work or {}, ready or {}, stall or {}
    loads = {
        target: Load(
            work=given_work.get(target, 0.1),
            ready=there.get(target, 1),
            known=target not in unknown,
            stall=stalls.get(target, 0.0),
            useful=useful if target.role == "experts" else None,
        )
        for target in ALL
    }
    return Signals(at=time, loads=loads, active=active, ttft=ttft, tpot=tpot, few=few)


def after(readings: Sequence[Signals], state: State = START, options: ScalingOptions = OPTIONS) -> State:
    for reading in readings:
        state = decide(reading, state, options)
    return state


def every_second(start: float, seconds: float, **how: object) -> list[Signals]:
    return [at(start + second, **how) for second in range(int(seconds))]  # type: ignore[arg-type]


def test_a_hot_shard_grows_at_once_and_alone() -> None:
    wanted = after([at(1, {HOT: 1.8})]).targets
    assert wanted == {HOT: math.ceil(1.8 / UTILISATION["experts"]), COLD: 1, ATTENTION: 1, GATEWAY: 2}


def test_the_way_down_goes_to_the_highest_need_of_the_last_while() -> None:
    state = after([at(1, {HOT: 2.7}), at(2, {HOT: 2.7}), at(50, {HOT: 1.0})])
    assert state.targets[HOT] == 4
    assert after([at(63)], state).targets[HOT] == 2
    assert after([at(63), at(111)], state).targets[HOT] == 1


def test_fewer_are_wanted_only_where_they_would_be_used_less_than_what_they_are_meant_for() -> None:
    """Just one replica's work: whoever has one keeps it, whoever has two keeps them."""
    state = after([at(1, {HOT: 1.0 * UTILISATION["experts"]})])
    assert state.targets[HOT] == 1
    state = after([at(1, {HOT: 1.5 * UTILISATION["experts"]})])
    state = after(every_second(2, 200, work={HOT: 1.0 * UTILISATION["experts"]}), state)
    assert state.targets[HOT] == 2
    assert after(every_second(300, 62, work={HOT: 0.75 * UTILISATION["experts"]}), state).targets[HOT] == 1


def test_bounds_hold_whatever_the_load() -> None:
    state = after([at(1, {HOT: 99.0, GATEWAY: 99.0})])
    assert (state.targets[HOT], state.targets[GATEWAY]) == (6, 4)
    assert after(every_second(2, 200), state).targets == {HOT: 1, COLD: 1, ATTENTION: 1, GATEWAY: 2}


def test_the_reason_for_what_is_wanted_is_named() -> None:
    state = after([at(1, {HOT: 2.0, COLD: 99.0})])
    assert [state.reasons[target] for target in ALL] == ["load", "ceiling", "load", "floor"]
    assert after([at(2)], state).reasons[HOT] == "hold", "fewer would do"
    assert after([at(2, unknown=[HOT])], state).reasons[HOT] == "unknown"
    assert after([at(70), at(75)], state).reasons[HOT] == "load"
    slow = after(every_second(1, REACTION_S + 5, work={HOT: 0.6}, tpot=2.0, stall={HOT: 0.5}))
    assert (slow.targets[HOT], slow.reasons[HOT]) == (2, "latency")
    asleep = after(every_second(1, 40, active=False), options=SLEEPY)
    assert [asleep.reasons[target] for target in ALL] == ["asleep", "asleep", "asleep", "floor"]


def test_a_shard_group_may_have_bounds_of_its_own() -> None:
    own = replace(SLEEPY, shards={0: Bounds(minimum=3, maximum=4)})
    assert after([at(1)], options=own).targets[HOT] == 3
    wanted = after([at(1, {HOT: 100.0, COLD: 100.0})], options=own).targets
    assert (wanted[HOT], wanted[COLD]) == (4, 6)
    assert after(every_second(1, 40, active=False), options=own).targets[HOT] == 0


def test_more_seats_than_callers_are_never_wanted() -> None:
    assert after([at(1, {HOT: 5.0}, useful=2)]).targets[HOT] == 2


def test_shards_grow_for_the_attention_workers_that_are_about_to_come() -> None:
    """Twice as many are needed as there are: seats for their work are asked for with them, not after them."""
    work = {HOT: 0.6, COLD: 0.2, ATTENTION: 2 * UTILISATION["attention"]}
    assert after([at(1, work)]).targets == {HOT: 2, COLD: 1, ATTENTION: 2, GATEWAY: 2}
    assert after([at(1, work, ready={ATTENTION: 2})]).targets[HOT] == 1


def test_without_signals_the_wish_stands_or_rises() -> None:
    state = after([at(1, {HOT: 1.8})])
    state = after(every_second(2, 200, unknown=[HOT]), state)
    assert state.targets[HOT] == 3
    known = {target: load for target, load in at(202).loads.items() if target != HOT}
    assert after([replace(at(202), loads=known)], state).targets[HOT] == 3, "it is not read at all"
    assert after([at(300, {HOT: 3.0}, unknown=[HOT])], state).targets[HOT] == 5
    assert after(every_second(202, 59), state).targets[HOT] == 3, "it is known again, and has to suffice for a while"
    assert after(every_second(202, 70), state).targets[HOT] == 1


def test_a_leader_that_takes_over_holds_what_was_wanted() -> None:
    state = State.starting(1000.0, {HOT: 5, COLD: 1, ATTENTION: 4, GATEWAY: 2})
    state = after(every_second(1000, 59), state)
    assert (state.targets[HOT], state.targets[ATTENTION]) == (5, 4)
    assert after(every_second(1059, 3), state).targets[HOT] == 1


def test_the_model_sleeps_as_a_whole_and_wakes_at_once() -> None:
    state = after(every_second(1, 5, work={HOT: 1.8}), options=SLEEPY)
    state = after(every_second(6, 29, active=False), state, SLEEPY)
    assert not state.asleep
    state = after(every_second(35, 10, active=False), state, SLEEPY)
    assert state.targets == {HOT: 0, COLD: 0, ATTENTION: 0, GATEWAY: 2}
    state = after([at(50, {ATTENTION: 2.0}, unknown=[HOT, COLD, ATTENTION])], state, SLEEPY)
    assert state.targets == {HOT: 1, COLD: 1, ATTENTION: 3, GATEWAY: 2}


def test_a_successor_lets_the_sleeping_sleep_and_wakes_them() -> None:
    state = State.starting(9.0, {HOT: 0, COLD: 0, ATTENTION: 0, GATEWAY: 1})
    assert after([at(10, active=False)], state, OPTIONS).targets[ATTENTION] == 1, (
        "a model that shall not sleep any more"
    )
    state = after([at(10, active=False)], state, SLEEPY)
    assert state.asleep
    assert after([at(11)], state, SLEEPY).targets[HOT] == 1


LATE = {"work": {HOT: 0.6, COLD: 0.3, ATTENTION: 0.5}, "tpot": 1.5}
LATE_IN_BOTH = {"work": {HOT: 0.7, COLD: 0.6, ATTENTION: 0.5}, "tpot": 1.5}
FIRST_TOKENS_LATE = {"work": {HOT: 0.6, ATTENTION: 0.5}, "stall": {HOT: 0.3}, "ttft": 3.0}
ONE_HOT = replace(OPTIONS, shards={0: Bounds(minimum=1, maximum=1)})
ONE_SEAT_EACH = replace(OPTIONS, bounds=OPTIONS.bounds | {"experts": Bounds(minimum=1, maximum=1)})


@pytest.mark.parametrize(
    ("options", "how", "wanted"),
    [
        pytest.param(OPTIONS, LATE | {"stall": {HOT: 0.5, COLD: 0.1}}, (2, 1, 1), id="the shard that is waited for"),
        pytest.param(OPTIONS, LATE, (1, 1, 2), id="attention where none is"),
        pytest.param(OPTIONS, LATE | {"stall": {HOT: 0.9}, "useful": 1}, (1, 1, 2), id="or more seats would not help"),
        pytest.param(OPTIONS, FIRST_TOKENS_LATE, (1, 1, 2), id="attention for late first tokens"),
        pytest.param(OPTIONS, LATE_IN_BOTH | {"stall": {HOT: 0.25, COLD: 0.6}}, (1, 2, 1), id="waited for longer"),
        pytest.param(ONE_HOT, LATE_IN_BOTH | {"stall": {HOT: 0.6, COLD: 0.25}}, (1, 2, 1), id="the second, if need be"),
        pytest.param(ONE_HOT, LATE_IN_BOTH | {"stall": {HOT: 0.6, COLD: 0.15}}, (1, 1, 1), id="hardly waited for"),
        pytest.param(ONE_SEAT_EACH, LATE_IN_BOTH | {"stall": {HOT: 0.3, COLD: 0.25}}, (1, 1, 1), id="most of a step"),
        pytest.param(
            ONE_SEAT_EACH,
            LATE_IN_BOTH | {"stall": {HOT: 0.3, COLD: 0.25}, "ttft": 1.5},
            (1, 1, 1),
            id="most of a step of first tokens",
        ),
    ],
)
def test_latencies_push_what_is_waited_for(
    options: ScalingOptions, how: dict[str, object], wanted: tuple[int, int, int]
) -> None:
    at_first = after(every_second(1, 3, **how), options=options).targets
    assert at_first == {HOT: 1, COLD: 1, ATTENTION: 1, GATEWAY: 2}
    pushed = after(every_second(1, REACTION_S + 3, **how), options=options).targets
    assert pushed == dict(zip((HOT, COLD, ATTENTION), wanted, strict=True)) | {GATEWAY: 2}


@pytest.mark.parametrize("late", [{"tpot": 2.0}, {"ttft": 2.0}, {"tpot": 2.0, "ttft": 2.0}])
def test_nobody_is_pushed_where_steps_wait_for_a_group_that_has_its_most(late: dict[str, float]) -> None:
    """More attention workers would wait for the same seats."""
    own = replace(OPTIONS, shards={0: Bounds(minimum=1, maximum=4)})
    work = {HOT: 4 * UTILISATION["experts"], ATTENTION: UTILISATION["attention"]}

    def pushed(stall: float, **how: object) -> dict[Target, int]:
        readings = every_second(1, 3 * REACTION_S, work=work, ready={HOT: 4}, stall={HOT: stall}, **late, **how)
        return dict(after(readings, options=own).targets)

    assert pushed(0.9) == {HOT: 4, COLD: 1, ATTENTION: 1, GATEWAY: 2}
    assert pushed(0.9, useful=4)[ATTENTION] == 1, "nor would more callers find more seats"
    assert pushed(0.1)[ATTENTION] == 2, "it is not what they wait for"
    assert pushed(0.3)[ATTENTION] == 2, "most of a step is attention"


def test_attention_that_cures_nothing_any_more_goes() -> None:
    """It was boosted while it was the cause; then the load moved to a group that has its maximum."""
    how = {"work": {HOT: 0.7, ATTENTION: 0.5}, "ready": {ATTENTION: 2}}
    state = after(every_second(1, REACTION_S + 3, **how, tpot=1.5), options=ONE_HOT)
    assert state.targets[ATTENTION] > 1
    waits = {"stall": {HOT: 0.8}, "tpot": 1.5}
    assert after(every_second(60, 3000, **how, **waits), state, ONE_HOT).targets[ATTENTION] == 1
    late = after(every_second(60, 3000, **how, **waits | {"stall": {HOT: 0.4}, "ttft": 1.2}), state, ONE_HOT)
    assert late.targets[ATTENTION] > 1, "first tokens wait for it"


def test_a_push_waits_for_the_replicas_that_the_one_before_asked_for() -> None:
    how = {"work": {ATTENTION: 0.7}, "ttft": 3.0}
    state = after(every_second(1, REACTION_S + 3, **how))
    assert state.targets[ATTENTION] == 2
    state = after(every_second(100, 200, **how), state)
    assert state.targets[ATTENTION] == 2, "the second one has not come"
    state = after(every_second(300, REACTION_S - 5, **how, ready={ATTENTION: 2}), state)
    assert state.targets[ATTENTION] == 2, "it has had no time to show what it changes"
    assert after(every_second(400, 2, **how, ready={ATTENTION: 2}), state).targets[ATTENTION] > 2


def test_what_starts_for_the_load_counts_before_a_push() -> None:
    """Three of five are there: that latencies are twice their target now does not say that five are too few."""
    how = {"work": {ATTENTION: 4.0}, "ready": {ATTENTION: 3}, "ttft": 3.0}
    assert after(every_second(1, 200, **how)).targets[ATTENTION] == 5


def test_a_target_that_cannot_be_met_costs_no_more_than_the_bound_on_pushes() -> None:
    state = START
    for second in range(5000):
        ready = {target: max(1, wanted) for target, wanted in state.targets.items()}
        state = decide(at(second, {ATTENTION: 0.2}, ready=ready, ttft=3.0), state, OPTIONS)
    assert state.targets[ATTENTION] == 1


def test_a_push_fades_when_latencies_are_well_below_their_targets() -> None:
    how = {"work": {ATTENTION: 0.5}, "ready": {ATTENTION: 2}}
    state = after(every_second(1, REACTION_S + 3, **how, ttft=2.0))
    pushed = state.targets[ATTENTION]
    assert pushed > 1
    assert after(every_second(60, 1000, **how, ttft=0.9), state).targets[ATTENTION] == pushed, "just met: it stands"
    assert after(every_second(60, 3000, **how, ttft=0.5), state).targets[ATTENTION] == 1
    assert after(every_second(60, 3000, **how, few=True), state).targets[ATTENTION] == 1, "too few requests to judge"
    assert after(every_second(60, 3000, **how), state).targets[ATTENTION] == pushed, "they are stuck: it stands"
    unheard = every_second(60, 3000, **how, few=True, unknown=[GATEWAY])
    assert after(unheard, state).targets[ATTENTION] == pushed, "nobody knows how they fare"


def test_latencies_of_before_the_load_fell_push_nobody() -> None:
    """The latencies cover half a minute, in which one replica has gone already."""
    quick = replace(OPTIONS, down_after_s=20.0, bounds=OPTIONS.bounds | {"experts": Bounds(minimum=1, maximum=3)})
    how = {"ready": {HOT: 3}, "stall": {HOT: 0.9}}
    busy = after(every_second(1, 120, work={HOT: 2.2}, tpot=2.0, **how), options=quick)
    assert busy.targets[HOT] == 3
    calm = after(every_second(121, 30, work={HOT: 0.3}, tpot=2.0, **how), busy, quick)
    calm = after(every_second(151, 20, work={HOT: 0.3}, few=True, **how), calm, quick)
    assert calm.targets[HOT] == 1


WORK = st.floats(0, 20)
READING = st.tuples(
    st.floats(0.1, 30),
    st.fixed_dictionaries(dict.fromkeys(ALL, WORK)),
    st.fixed_dictionaries(dict.fromkeys(ALL, st.integers(0, 6))),
    st.booleans(),
    st.lists(st.sampled_from(ALL), max_size=2),
    st.sampled_from([None, 0.25, 0.7, 0.9, 1.25, 3.0]),
    st.sampled_from([None, 0.25, 0.7, 0.9, 1.25, 3.0]),
    st.fixed_dictionaries({HOT: st.floats(0, 1), COLD: st.floats(0, 1)}),
)


def course(drawn: Sequence[tuple]) -> list[Signals]:  # type: ignore[type-arg]
    time, readings = 0.0, []
    for passed, work, ready, active, unknown, ttft, tpot, stall in drawn:
        time += passed
        readings.append(at(time, work, ready=ready, active=active, unknown=unknown, ttft=ttft, tpot=tpot, stall=stall))
    return readings


@given(st.lists(READING, max_size=40))
@settings(max_examples=150)
def test_whatever_comes_bounds_hold_and_the_model_sleeps_whole_or_not_at_all(drawn: list) -> None:  # type: ignore[type-arg]
    state = START
    for reading in course(drawn):
        state = decide(reading, state, SLEEPY)
        model = [wanted for target, wanted in state.targets.items() if target.sleeps]
        assert all(wanted == 0 for wanted in model) if state.asleep else all(1 <= wanted <= 6 for wanted in model)
        assert 2 <= state.targets[GATEWAY] <= 4
        assert not (state.asleep and reading.active)


@given(st.lists(READING, max_size=40))
@settings(max_examples=150)
def test_whatever_comes_neither_what_is_not_known_nor_what_was_needed_within_the_window_shrinks(drawn: list) -> None:  # type: ignore[type-arg]
    state, needs = START, []
    for reading in course(drawn):
        before, state = state, decide(reading, state, OPTIONS)
        for target, load in reading.loads.items():
            if not load.known:
                assert state.targets[target] >= before.targets[target]
        needs.append((reading.at, state.courses[HOT].need))
        recent = max(need for then, need in needs if then > reading.at - OPTIONS.down_after_s)
        assert state.targets[HOT] >= min(6, math.ceil(recent - 0.1))


@given(WORK, st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=30))
@settings(max_examples=100)
def test_a_steady_load_is_answered_once_whatever_becomes_ready_when(work: float, held: int, ready: list[int]) -> None:
    state = State.starting(0.0, {HOT: held, COLD: 1, ATTENTION: 1, GATEWAY: 2})
    wanted = []
    for second, there in enumerate(ready):
        state = decide(at(100.0 + 61 * second, {HOT: work}, ready={HOT: there}), state, OPTIONS)
        wanted.append(state.targets[HOT])
    assert len(set(wanted)) == 1


@given(WORK, WORK)
@settings(max_examples=100)
def test_more_work_never_asks_for_fewer(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert after([at(1, {HOT: low})]).targets[HOT] <= after([at(1, {HOT: high})]).targets[HOT]


@given(st.floats(0.3, 4.0), st.floats(0.0, 0.25), st.integers(0, 2**32))
@settings(max_examples=50)
def test_noise_around_a_load_moves_nothing_back_and_forth(work: float, noise: float, seed: int) -> None:
    """Once up it stays up: in ten minutes of one load, within noise, replicas are taken away every other minute at
    most, where the noise reaches the next whole number so rarely."""
    chance, state, path = random.Random(seed), START, []
    for second in range(600):
        state = decide(at(second, {HOT: work * (1 + chance.uniform(-noise, noise))}), state, OPTIONS)
        path.append(state.targets[HOT])
    falls = sum(later < earlier for earlier, later in pairwise(path[120:]))
    assert falls <= 4
