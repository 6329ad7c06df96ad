"""Which steps begin together, in a world of clients whose steps take as long as the test says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.fabric.shared_memory.joint.policy import FIRST_BAR_S, FORGET_S, MAX_BAR_S, Hold, JoinPolicy

ROWS, MAX_S = 64, 0.006


@dataclass
class World:
    """Clients whose steps follow each other. ``alone_s`` and ``joined_s``: of a step, where it runs alone or begins
    with all others; ``gap_s``: of the client between two."""

    joined_s: float
    offsets: Sequence[float] = (0.0, 0.004)
    alone_s: float = 0.01
    gap_s: Callable[[int, int], float] = lambda _place, _step: 0.0002
    policy: JoinPolicy = field(default_factory=JoinPolicy)
    joined: list[bool] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)

    def run(self, steps: int) -> None:
        """So many steps in all."""
        coming = [(offset, place, 0) for place, offset in enumerate(self.offsets)]
        heapq.heapify(coming)
        held: dict[int, tuple[float, int]] = {}
        awaited: set[int] = set()
        until = 0.0
        while len(self.joined) < steps:
            if held and (not coming or until <= coming[0][0]):
                self._go(held, until, coming)
                continue
            now, place, number = heapq.heappop(coming)
            hold = self.policy.come(place, ROWS, now, MAX_S)
            if hold is None:
                self._begin(place, number, now, now, False, coming)
                continue
            if not held:
                awaited, until = set(hold.places), now + hold.seconds
            held[place] = now, number
            awaited.discard(place)
            if not awaited:
                self._go(held, now, coming)

    def _go(self, held: dict[int, tuple[float, int]], now: float, coming: list[tuple[float, int, int]]) -> None:
        for place, (came, number) in held.items():
            self._begin(place, number, came, now, len(held) == len(self.offsets), coming)
        held.clear()

    def _begin(
        self, place: int, number: int, came: float, now: float, joined: bool, coming: list[tuple[float, int, int]]
    ) -> None:
        self.joined.append(joined)
        self.held_s.append(now - came)
        self.policy.began(place, now, together=joined)
        takes_s = self.joined_s if joined else self.alone_s
        heapq.heappush(coming, (now + takes_s + self.gap_s(place, number), place, number + 1))


def come(policy: JoinPolicy, place: int, now: float) -> Hold | None:
    """A step that begins at once."""
    hold = policy.come(place, ROWS, now, MAX_S)
    policy.began(place, now, together=False)
    return hold


def twenty_each(policy: JoinPolicy, now: float = 0.0, *, lead_s: float = 0.0) -> float:
    """A step of two clients each 10 ms, client 1's so much sooner. When the last of client 0 came."""
    for _ in range(20):
        now += 0.01
        come(policy, 1, now - lead_s)
        come(policy, 0, now)
    return now


@pytest.mark.parametrize(
    "offsets", [(0.0, 0.001), (0.0, 0.0055), (0.0, 0.009), (0.0, 0.003, 0.008), (0.0, 0.0, 0.0, 0.0)]
)
def test_clients_meet_once_and_stay_together_where_that_pays(offsets: Sequence[float]) -> None:
    world = World(joined_s=0.007, offsets=offsets)
    world.run(3000)
    assert sum(world.joined[-400:]) == 400
    assert max(world.held_s) <= MAX_S
    assert sum(world.held_s[-400:]) < 400 * 1e-6, "they come at the same moment"


def test_clients_run_alone_where_that_is_faster_and_it_is_tried_again() -> None:
    world = World(joined_s=0.0102)
    world.run(60_000)
    assert sum(world.joined) < 0.05 * len(world.joined)
    assert not any(world.held_s[-1000:])
    world.joined_s = 0.006
    world.run(120_000)
    assert sum(world.joined[-2000:]) > 1500, "by now it pays"


@pytest.mark.parametrize(
    ("facts", "steps", "joined"),
    [
        ({"joined_s": 0.00995}, 5000, range(100)),
        ({"joined_s": 0.00973, "offsets": (0.0, 0.0052)}, 6000, range(901, 1001)),
        # One client needs 6 ms more between its steps: together, the other one would have them, too.
        ({"joined_s": 0.009, "gap_s": lambda place, _: 0.006 * place}, 6000, range(300)),
        # In a trial of steps together, both clients have no requests for 0.9 s now and then.
        ({"joined_s": 0.007, "gap_s": lambda _, step: 0.9 if step % 7 == 3 and step < 34 else 0.0002}, 2100, [1000]),
    ],
    ids=["no faster", "a small gain that lasts", "uneven clients", "rests show nothing about the way that ran"],
)
def test_steps_join_only_if_all_gain(facts: dict[str, Any], steps: int, joined: Collection[int]) -> None:
    """``joined``: of the last thousand."""
    world = World(**facts)
    world.run(steps)
    assert sum(world.joined[-1000:]) in joined


def test_a_client_alone_is_never_held() -> None:
    world = World(joined_s=0.001, offsets=(0.0,))
    world.run(500)
    assert not any(world.held_s)


@pytest.mark.parametrize(
    ("leaves", "after_s", "hold"),
    [
        (False, 0.004, Hold((1,), pytest.approx(0.0008))),
        (True, 0.004, None),
        (False, 0.01, Hold()),
        (False, 0.05, None),
    ],
    ids=["expected", "has left", "is late", "rests: three of its periods have gone by"],
)
def test_a_step_is_held_for_who_is_expected(leaves: bool, after_s: float, hold: Hold | None) -> None:
    policy = JoinPolicy()
    now = twenty_each(policy, lead_s=0.006)
    if leaves:
        policy.leave(1)
    assert come(policy, 0, now + after_s) == hold


def test_a_pause_of_ones_own_is_no_step() -> None:
    policy = JoinPolicy()
    now = twenty_each(policy)
    assert come(policy, 0, now + 2 * FORGET_S) is None
    assert come(policy, 1, now + 2 * FORGET_S + 0.001) is None


def test_steps_of_another_size_are_judged_for_themselves() -> None:
    policy, now = JoinPolicy(), 0.0
    for number in range(3000):  # steps alternate in size; the large ones take longer together
        hold = None
        rows = ROWS * (16 if number % 2 else 1)
        for place in (0, 1):
            hold = policy.come(place, rows, now, MAX_S)
        for place in (0, 1):
            policy.began(place, now, together=hold is not None)
        takes_s = {False: 0.01, True: 0.007 if rows == ROWS else 0.02}
        now += takes_s[hold is not None]
    ways = {rows: size.together for (rows, _), size in policy._sizes.items() if size.left}
    assert ways == {ROWS.bit_length(): True, (16 * ROWS).bit_length(): False}


def test_who_was_late_runs_alone_for_longer_each_time() -> None:
    policy, now = JoinPolicy(), 0.0
    for wanted_s in (FIRST_BAR_S, 2 * FIRST_BAR_S, 4 * FIRST_BAR_S):
        now = twenty_each(policy, now)
        assert policy._paces.keys() == {0, 1}
        assert policy.failed(0, now) == wanted_s
        for share in (0.1, 0.5, 0.9):
            assert come(policy, 0, now + share * wanted_s) is None
            assert come(policy, 1, now + share * wanted_s) is None, "nobody is held for it either"
            assert policy._paces.keys() == {1}
        now += wanted_s
    for _ in range(20):
        seconds = policy.failed(0, now)
    assert seconds == MAX_BAR_S
    policy.leave(0)
    assert policy.failed(0, now) == FIRST_BAR_S, "another client of its place"


def test_a_step_that_cannot_be_joined_shows_nothing() -> None:
    policy = JoinPolicy()
    now = twenty_each(policy)
    policy.rest(0)
    assert come(policy, 1, now + 0.01) is None, "it is alone"
    seen = {key: len(size.seen) for key, size in policy._sizes.items()}
    assert come(policy, 0, now + 0.02) is None
    assert seen == {key: len(size.seen) for key, size in policy._sizes.items()}
