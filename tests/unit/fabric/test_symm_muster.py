"""Who begins with whom, with guests and teams that only write down what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from moe_kernels.exchange_layout import Layout
from services.fabric.symm_muster import Muster
from services.fabric.symm_team import Guest, Joining, Team
from services.fabric.symm_tempo import Hold, Tempo
from services.fabric.symm_wire import Step

LAYOUT, OTHER = (Layout(rows=rows, hidden=4, slots=2, dtype=torch.float32) for rows in (8, 16))
STEP = Step(epoch=0, step=0, base=0, bucket=8, micro_batches=1)


@dataclass(eq=False)
class Fake:
    place: int
    layout: Layout = LAYOUT
    begun: int = 0
    inbox: int = 0
    answers_at: int = 0

    def begin(self, _step: Step, _wait_s: float) -> None:
        self.begun += 1


@dataclass
class FakeTeam:
    members: int
    busy: bool = False
    stuck: bool = False
    seconds: float = 0.0
    started: list[list[int]] = field(default_factory=list)
    parted: list[int] = field(default_factory=list)

    def fits(self, steps: Sequence[Joining]) -> bool:
        return len(steps) <= self.members and not self.busy

    def start(self, steps: Sequence[Joining]) -> None:
        self.started.append([joining.guest.place for joining in steps])

    def part(self, guest: Guest, _pause: Callable[[], object]) -> bool:
        self.parted.append(guest.place)
        return not self.stuck

    def idle(self) -> bool:
        return not self.busy

    def close(self) -> None:
        self.busy = False


@dataclass
class Scene:
    muster: Muster
    began: list[tuple[int, bool]]

    def enlist(self, *teams: FakeTeam) -> None:
        for team in teams:
            self.muster.enlist(LAYOUT, cast(Team, team))

    def begin(self, *guests: Any, step: Step = STEP) -> None:
        for guest in guests:
            self.muster.begin(guest, step)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Each of the first three places is held for the other two, for ever."""
    began: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        Tempo, "come", lambda _self, place, *_: Hold(tuple({0, 1, 2} - {place}), 60.0) if place < 3 else None
    )
    monkeypatch.setattr(Tempo, "began", lambda _self, place, _now, *, together: began.append((place, together)))
    muster = Muster(2.0, 0.006)
    yield Scene(muster, began)
    muster.close()


def test_the_smallest_team_that_fits_takes_all_that_came(scene: Scene) -> None:
    small, large = FakeTeam(4), FakeTeam(8)
    scene.enlist(FakeTeam(2), large, small)
    scene.begin(Fake(0), Fake(2))
    assert not scene.muster.idle()
    scene.begin(Fake(1))
    assert (small.started, large.started) == ([[0, 2, 1]], [])
    assert scene.began == [(0, True), (2, True), (1, True)]
    assert scene.muster.joined_steps == 3
    assert scene.muster.idle()


def test_without_a_team_that_is_free_each_begins_alone(scene: Scene) -> None:
    scene.enlist(FakeTeam(4, busy=True))
    guests = Fake(0), Fake(1), Fake(2)
    scene.begin(*guests)
    assert [guest.begun for guest in guests] == [1, 1, 1]
    assert scene.began == [(0, False), (1, False), (2, False)]
    assert scene.muster.joined_steps == 0


def test_who_is_not_to_be_held_and_who_has_no_team_begins_at_once(scene: Scene) -> None:
    scene.enlist(FakeTeam(4))
    guests = Fake(0), Fake(7), Fake(1, OTHER)
    scene.begin(*guests)
    assert [guest.begun for guest in guests] == [0, 1, 1]
    halves = Step(epoch=0, step=0, base=0, bucket=8, micro_batches=2)
    scene.begin(other := Fake(2), step=halves)
    assert other.begun == 1


def test_steps_of_another_layout_do_not_join_those_that_are_held(scene: Scene) -> None:
    team = FakeTeam(4)
    scene.enlist(team)
    scene.muster.enlist(OTHER, cast(Team, FakeTeam(4)))
    guests = Fake(0), Fake(1, OTHER), Fake(2)
    scene.begin(*guests)
    assert [guest.begun for guest in guests] == [0, 1, 0]


def test_a_guest_is_parted_from_its_team_before_its_next_step_begins(scene: Scene) -> None:
    team = FakeTeam(4)
    scene.enlist(team)
    scene.begin(Fake(7))
    assert team.parted == [7]


def test_a_guest_whose_memory_is_still_in_use_begins_nothing(scene: Scene) -> None:
    scene.enlist(FakeTeam(4, stuck=True))
    scene.begin(guest := Fake(7))
    assert guest.begun == 0
    assert not scene.muster.leave(cast(Guest, guest))


def test_a_step_that_comes_again_is_held_once(scene: Scene) -> None:
    team = FakeTeam(4)
    scene.enlist(team)
    first = Fake(0)
    scene.begin(first, first, Fake(1), Fake(2))
    assert team.started == [[0, 1, 2]]


def test_who_has_left_is_neither_held_nor_waited_for(scene: Scene) -> None:
    team = FakeTeam(4)
    scene.enlist(team)
    gone = Fake(1)
    scene.begin(Fake(0), gone)
    assert scene.muster.leave(cast(Guest, gone))
    scene.begin(Fake(2))
    assert team.started == [[0, 2]]
