"""Who begins with whom, with clients and joint steps that only record their calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from testkit.waiting import until

from moe_kernels.exchange.layout import Layout
from services.errors import FabricError, WireError
from services.fabric.shared_memory.joint.policy import Hold, JoinPolicy
from services.fabric.shared_memory.joint.queue import GRACE_SHARE, HOLD_SHARE, JoinQueue
from services.fabric.shared_memory.joint.steps import Client, JointStep, PendingStep
from services.fabric.shared_memory.messages import Step

LAYOUT, OTHER = (Layout(rows=rows, hidden=4, slots=2, dtype=torch.float32) for rows in (8, 16))
LONG_S = 20.0


def step_of(bucket: int = 8, *, micro_batches: int = 1, whole: bool = True, deadline_s: float = 60.0) -> Step:
    return Step(
        epoch=0, step=0, base=0, bucket=bucket, micro_batches=micro_batches, deadline_s=deadline_s, whole=whole
    )  # fmt: skip


@dataclass(eq=False)
class Fake:
    place: int
    layout: Layout = LAYOUT
    begun: int = 0
    stopped: int = 0
    free: bool = True
    inbox: int = 0
    answers_at: int = 0

    def begin(self, _step: Step, _wait_s: float) -> None:
        self.begun += 1

    def idle(self) -> bool:
        return self.free

    def give_up(self) -> None:
        self.stopped += 1


@dataclass(eq=False)
class FakeJointStep:
    members: int
    most: int = 64
    busy: bool = False
    stuck: bool = False
    late: bool = False
    broken: bool = False
    seconds: float = 1.0
    closed: bool = False
    started: list[list[int]] = field(default_factory=list)
    grace_s: float = 0.0
    parted: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    def fits(self, steps: Sequence[PendingStep]) -> bool:
        small = max(joining.step.bucket for joining in steps) <= self.most
        return small and len(steps) <= self.members and not self.busy

    def start(self, steps: Sequence[PendingStep], grace_s: float) -> None:
        if self.broken:
            raise RuntimeError("the GPU said no")
        self.started.append([joining.client.place for joining in steps])
        self.grace_s, self.busy = grace_s, True

    def was_late(self, _client: Client) -> bool:
        return self.late

    def leave_out(self, client: Client) -> None:
        self.left_out.append(client.place)

    def part(self, client: Client, _pause: Callable[[], object]) -> bool:
        self.parted.append(client.place)
        return not self.stuck

    def idle(self) -> bool:
        return not self.busy

    def close(self) -> None:
        self.closed = True


@dataclass
class Scene:
    """Of the first three places each is held for the other two, for as long as may be, and so are ``too``."""

    join_queue: JoinQueue
    joint_steps: dict[int, FakeJointStep]
    began: list[tuple[int, bool]]

    def enter(self, *places: int, layout: Layout = LAYOUT) -> list[Fake]:
        clients = [Fake(place, layout) for place in places]
        for client in clients:
            self.join_queue.enter(client)
        until(lambda: not any(one.missing() for one in self.join_queue._groups.values()), "joint steps are made")
        return clients

    def begin(self, *clients: Fake, step: Step | None = None) -> None:
        for client in clients:
            self.join_queue.begin(client, step or step_of())


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    began: list[tuple[int, bool]] = []

    def come(_policy: JoinPolicy, place: int, _rows: int, _now: float, max_s: float) -> Hold | None:
        return Hold(tuple({0, 1, 2} - {place}), max_s) if place < 3 else None

    monkeypatch.setattr(JoinPolicy, "come", come)
    monkeypatch.setattr(JoinPolicy, "began", lambda _self, place, _now, *, together: began.append((place, together)))
    joint_steps = {size: FakeJointStep(size) for size in (2, 4, 8)}
    join_queue = JoinQueue(lambda _layout, members: cast(JointStep, joint_steps[members]), 2.0)
    yield Scene(join_queue, joint_steps, began)
    join_queue.close()


@pytest.mark.parametrize(
    ("clients", "sizes"), [(1, []), (2, [2]), (3, [2, 4]), (4, [2, 4]), (5, [2, 4, 8]), (16, [2, 4, 8])]
)
def test_joint_steps_of_every_size_are_made_whoever_came_first(scene: Scene, clients: int, sizes: list[int]) -> None:
    scene.enter(*range(clients))
    (group,) = scene.join_queue._groups.values()
    assert [joint_step.members for joint_step in group.joint_steps] == sizes


def test_a_client_is_served_while_joint_steps_are_made() -> None:
    making, go_on = threading.Event(), threading.Event()

    def make(_layout: Layout, members: int) -> JointStep:
        making.set()
        go_on.wait(LONG_S)
        return cast(JointStep, FakeJointStep(members))

    join_queue, clients = JoinQueue(make, 2.0), [Fake(0), Fake(1)]
    for client in clients:
        join_queue.enter(client)
    assert making.wait(LONG_S)
    for client in clients:
        join_queue.begin(client, step_of())
    assert [client.begun for client in clients] == [1, 1]
    for client in clients:
        assert join_queue.leave(client)
    go_on.set()
    join_queue.close()


def test_what_cannot_be_made_is_tried_once() -> None:
    tried: list[int] = []

    def make(_layout: Layout, members: int) -> JointStep:
        tried.append(members)
        raise FabricError("no room") if members == 2 else KeyError("no kernel")

    join_queue = JoinQueue(make, 2.0)
    for place in range(3):
        join_queue.enter(Fake(place))
    until(lambda: tried == [2, 4], "both are tried")
    join_queue.enter(client := Fake(3))
    join_queue.begin(client, step_of())
    assert client.begun == 1
    assert tried == [2, 4]
    join_queue.close()


def test_the_smallest_joint_step_that_fits_takes_all_that_came(scene: Scene) -> None:
    clients = scene.enter(*range(5))
    scene.begin(clients[0], clients[2])
    assert not scene.join_queue.idle()
    scene.begin(clients[1])
    assert [scene.joint_steps[size].started for size in (2, 4, 8)] == [[], [[0, 2, 1]], []]
    assert scene.joint_steps[4].grace_s == pytest.approx(GRACE_SHARE * 60)
    assert HOLD_SHARE + GRACE_SHARE < 1
    assert sorted(scene.began) == [(0, True), (1, True), (2, True)]
    assert scene.join_queue.joined_steps == 3
    assert scene.join_queue.seconds == 3.0


@pytest.mark.parametrize(
    ("busy", "broken", "last", "started", "alone"),
    [
        ((4,), (), step_of(16), [[2, 0]], [1]),
        ((), (), step_of(512), [[0, 1]], [2]),
        ((), (), step_of(micro_batches=2), [[0, 1]], [2]),
        ((), (), step_of(whole=False), [[0, 1]], [2]),
        ((2, 4, 8), (), step_of(), [], [0, 1, 2]),
        ((4,), (2,), step_of(), [], [2]),
    ],
    ids=["all do not fit", "too large", "two micro-batches", "not whole", "none is free", "one fails to start"],
)
def test_what_cannot_begin_together_begins_in_parts_or_alone(
    scene: Scene, busy: Sequence[int], broken: Sequence[int], last: Step, started: list[list[int]], alone: list[int]
) -> None:
    """A joint step that fails to start fails nobody else."""
    clients = scene.enter(0, 1, 2)
    for size, joint_step in scene.joint_steps.items():
        joint_step.busy, joint_step.broken = size in busy, size in broken
    scene.begin(clients[0], clients[1])
    scene.begin(clients[2], step=last)
    assert [joint_step.started for joint_step in scene.joint_steps.values()] == [started, [], []]
    assert [client.place for client in clients if client.begun] == alone
    assert sorted(scene.began) == sorted(
        [(place, True) for places in started for place in places] + [(place, False) for place in alone]
    )
    assert scene.join_queue.joined_steps == sum(map(len, started))


def test_who_is_to_run_alone_begins_at_once(scene: Scene) -> None:
    clients = scene.enter(0, 7)
    scene.begin(*clients)
    assert [client.begun for client in clients] == [0, 1]


def test_layouts_are_separate(scene: Scene) -> None:
    clients = scene.enter(0, 2) + scene.enter(1, layout=OTHER)
    scene.begin(*clients)
    assert [client.begun for client in clients] == [0, 0, 1], "the one of its layout has no joint step"


def test_nobody_is_held_beyond_a_share_of_its_deadline(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    scene.begin(clients[0])
    began = time.monotonic()
    scene.begin(clients[1], step=step_of(deadline_s=0.2))
    until(lambda: scene.joint_steps[2].started == [[0, 1]], "both begin")
    assert time.monotonic() - began >= HOLD_SHARE * 0.2


def test_a_client_is_parted_from_its_joint_step_before_its_next_step_begins(scene: Scene) -> None:
    clients = scene.enter(7, 8)
    scene.begin(clients[0])
    assert scene.joint_steps[2].parted == [7]


def test_who_stops_is_left_out_without_a_wait_and_held_no_more(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    scene.begin(clients[0], clients[1])
    scene.join_queue.stop(clients[0], clients[0].give_up)
    assert (clients[0].stopped, scene.joint_steps[2].left_out, scene.joint_steps[4].left_out) == (1, [0], [0])
    assert len(scene.joint_steps[2].parted) == 2, "as both began"
    scene.begin(clients[2])
    assert [sorted(places) for places in scene.joint_steps[2].started] == [[1, 2]]


def test_who_was_late_is_reported_to_the_policy(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []
    monkeypatch.setattr(JoinPolicy, "failed", lambda _self, place, _now: failed.append(place) or 1.0)
    clients = scene.enter(7, 8)
    scene.begin(clients[1])
    scene.join_queue.stop(clients[1], clients[1].give_up)
    assert not failed
    scene.joint_steps[2].late = True
    scene.begin(clients[1])
    assert not failed, "a step that failed is stopped first: nothing is asked of the device at the others"
    scene.join_queue.stop(clients[1], clients[1].give_up)
    assert failed == [8]


def test_a_client_whose_memory_is_still_in_use_begins_nothing(scene: Scene) -> None:
    clients = scene.enter(7, 8)
    scene.joint_steps[2].stuck = True
    with pytest.raises(WireError, match="client 7 cannot start"):
        scene.begin(clients[0])
    assert clients[0].begun == 0
    assert not scene.join_queue.leave(clients[0])


def test_who_has_not_entered_begins_and_stops_nothing(scene: Scene) -> None:
    scene.enter(0)
    unknown = Fake(1)
    with pytest.raises(WireError, match="Client 1 started or stopped a step before"):
        scene.begin(unknown)
    with pytest.raises(WireError):
        scene.join_queue.stop(unknown, unknown.give_up)
    assert (unknown.begun, unknown.stopped) == (0, 0)


def test_a_step_that_comes_again_is_held_once(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    scene.begin(clients[0], clients[0], clients[1], clients[2])
    assert scene.joint_steps[4].started == [[0, 1, 2]]


def test_who_has_left_is_not_among_those_that_begin_together(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    scene.begin(clients[0], clients[1])
    assert scene.join_queue.leave(clients[1])
    scene.begin(clients[2])
    assert scene.joint_steps[2].started == [[0, 2]]


def test_who_has_left_is_neither_held_nor_waited_for(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    scene.begin(clients[0], clients[1])
    assert scene.join_queue.leave(clients[1])
    assert [client.begun for client in clients] == [0, 0, 0], "client 2 may still come"
    assert scene.join_queue.leave(clients[2])
    assert [client.begun for client in clients] == [1, 0, 0]


def test_joint_steps_end_with_the_last_client_of_their_layout(scene: Scene) -> None:
    clients = scene.enter(0, 1, 2)
    for client in clients[:2]:
        scene.join_queue.leave(client)
    assert not scene.joint_steps[2].closed
    scene.join_queue.leave(clients[2])
    assert [scene.joint_steps[size].closed for size in (2, 4, 8)] == [True, True, False]
    assert scene.join_queue.seconds == 2.0, "what they computed stays counted"
    assert scene.join_queue.leave(clients[2])


def test_without_joint_steps_every_step_begins_alone() -> None:
    join_queue, client = JoinQueue(None, 2.0), Fake(0)
    join_queue.enter(client)
    join_queue.begin(client, step_of())
    assert client.begun == 1
    join_queue.close()
