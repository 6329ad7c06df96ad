"""The processes of an application on Ray, with actors that a test makes: spread, replaced, tried elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.config import Settings
from services.ray import member, placement
from services.ray import members as module
from services.ray.arguments import Arguments, Resources
from services.ray.fleet import Gone, Place, Unavailable
from services.ray.keeper import Report
from services.ray.members import Members
from services.ray.units import units

ARGUMENTS = Arguments.model_validate({"settings": {"model": "m"}})


@dataclass(eq=False)
class Actor:
    name: str
    node: str
    state: str = "ready"
    gone: bool = False
    dead: str = ""
    life: str = "first"
    arguments: Mapping[str, Any] = field(default_factory=dict)


class ActorsOfATest:
    """Stands in for :class:`services.ray.fleet.Fleet`. Actors are ready at once, unless ``fails`` says otherwise."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.stopped: list[str] = []
        self.killed: list[str] = []
        self.groups: dict[str, bool] = {}
        self.initial = "ready"
        self.fails: Callable[[str, str], bool] = lambda *_: False

    def names(self) -> list[str]:
        return [*self.actors, "redis"]

    def find(self, name: str) -> Actor:
        return self.actors[name]

    async def secret(self, actor: Actor) -> str | None:
        return str(actor.arguments.get("secret", ""))

    def start(
        self, name: str, arguments: Mapping[str, Any], _needs: Resources, _gpus: float, place: Place, _env: object
    ) -> Actor:
        assert place.node is not None or place.pack is not None
        failed = self.fails(arguments["name"], place.node or "")
        self.actors[name] = Actor(name, place.node or "", "failed" if failed else self.initial, arguments=arguments)
        return self.actors[name]

    async def report(self, actor: Actor) -> Report:
        if actor.dead:
            raise Gone(actor.dead)
        if actor.gone:
            raise Unavailable(actor.name)
        if actor.state == "pending":
            return None
        state: Any = actor.state
        waits = "the folder does not exist" if state == "failed" else ""
        where = {"host": "h", "address": "1.2.3.4", "node": actor.node, "life": actor.life}
        return Report(state=state, waits_for=waits, pid=7, metrics_port=9, **where)

    async def stop(self, actor: Actor, _timeout_s: float) -> None:
        self.stopped.append(actor.name.partition("@")[0])
        self.actors.pop(actor.name, None)

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.name.partition("@")[0])
        self.actors.pop(actor.name, None)

    def packs(self) -> dict[str, bool]:
        return dict(self.groups)

    def pack(self, name: str, *_: object) -> str:
        self.groups.setdefault(name, True)
        return name

    def unpack(self, name: str) -> None:
        del self.groups[name]


class NoticesOfATest:
    def __init__(self) -> None:
        self.sent: list[tuple[int, str, str]] = []

    def ended(self, pid: int, *, name: str, host: str, **_: object) -> None:
        self.sent.append((pid, name.partition("@")[0], host))


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ActorsOfATest:
    listed = [{"NodeID": name, "Labels": {}, "Resources": {"CPU": 4.0, "GPU": 1.0}} for name in ("a", "b", "c")]
    monkeypatch.setattr(placement, "nodes", lambda: listed)
    monkeypatch.setattr(placement, "resources", lambda **_: {"CPU": 8.0})
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(member, "NO_ROOM_S", -1.0)
    return ActorsOfATest()


class Rounds:
    def __init__(self, fleet: ActorsOfATest) -> None:
        self.members, self.notices = Members(fleet, ARGUMENTS, "app"), NoticesOfATest()  # type: ignore[arg-type]

    async def __call__(self, count: int, settings: Settings, secret: str = "s") -> None:
        wanted = units(settings, schedulers=1)
        for _ in range(count):
            await self.members.round(wanted, settings, secret, self.notices)  # type: ignore[arg-type]
            await asyncio.sleep(0)

    def states(self) -> dict[str, str]:
        return {row["unit"]: row["state"] for row in self.members.rows()}


async def test_replicas_of_a_kind_are_on_different_nodes(fleet: ActorsOfATest) -> None:
    settings = Settings(layout="disaggregated", workers=3, expert_workers=6, expert_groups=2)
    await Rounds(fleet)(1, settings)
    for kind in ("attention", "experts-0", "experts-1"):
        assert sorted(actor.node for name, actor in fleet.actors.items() if name.startswith(kind)) == ["a", "b", "c"]


async def test_other_settings_replace_one_process_at_a_time_and_those_that_fail_first(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings(workers=3))
    fleet.actors[next(name for name in fleet.actors if name.startswith("attention-2"))].state = "starting"
    await rounds(1, Settings(workers=3))
    other = Settings(workers=3, max_num_seqs=7)
    await rounds(1, other)
    await rounds(1, other)
    assert fleet.stopped == ["attention-2"], "its successor has not said that it is ready"
    await rounds(8, other)
    assert sorted(fleet.stopped) == ["attention-0", "attention-1", "attention-2"], "no scheduler reads that setting"
    assert [actor.arguments["settings"]["max_num_seqs"] for actor in fleet.actors.values()][1:] == [7, 7, 7]


async def test_fewer_that_are_wanted_end_at_once(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings(workers=3))
    wanted = units(Settings(workers=3), schedulers=1)[:2]
    await rounds.members.round(wanted, Settings(workers=3), "s", rounds.notices)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert sorted(fleet.stopped) == ["attention-1", "attention-2"]


async def test_a_process_whose_node_lacks_the_model_is_tried_elsewhere(fleet: ActorsOfATest) -> None:
    fleet.fails = lambda name, node: name == "attention-0" and node != "c"
    rounds = Rounds(fleet)
    await rounds(2, Settings())
    assert rounds.states()["attention-0"] == "failed"
    (row,) = [row for row in rounds.members.rows() if row["unit"] == "attention-0"]
    assert row["waits_for"] == "the folder does not exist"
    await rounds(10, Settings())
    assert rounds.states() == {"attention-0": "ready", "scheduler-0": "ready"}
    assert {actor.node for name, actor in fleet.actors.items() if name.startswith("attention")} == {"c"}


async def test_the_end_of_an_actor_is_reported_once_with_its_host(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings())
    actor = next(actor for name, actor in fleet.actors.items() if name.startswith("attention"))
    actor.gone = True
    await rounds(3, Settings())
    assert rounds.notices.sent == [(7, "attention-0", "h")]
    assert rounds.states()["attention-0"] == "died"
    actor.gone = False
    await rounds(1, Settings())
    assert rounds.states()["attention-0"] == "ready"


async def test_a_successor_finds_the_actors_and_their_secret(fleet: ActorsOfATest) -> None:
    await Rounds(fleet)(2, Settings(), secret="of the first")
    before = set(fleet.actors)
    later = Rounds(fleet)
    assert await later.members.adopt() == "of the first"
    await later(2, Settings(), secret="of the first")
    assert set(fleet.actors) == before
    assert fleet.stopped == []


async def test_what_there_is_no_room_for_is_said(fleet: ActorsOfATest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "resources", lambda free=False: {"CPU": 0.5, "GPU": 8.0 if not free else 0.0})
    fleet.initial = "pending"
    rounds = Rounds(fleet)
    await rounds(1, Settings(workers=2))
    assert rounds.members.lacking == (
        "scheduler-0, attention-0, attention-1 wait for room: there are 0.5 of 2.1 CPU and 0 of 2 GPU free"
    )


@pytest.mark.parametrize(
    ("attention", "lacks"),
    [
        ({"gpus": 2}, "1 CPU and 2 GPU"),
        ({"gpus": 0, "resources": {"h200": 1}}, "1 CPU and 1 h200"),
        ({"gpus": 0, "labels": {"zone": "z"}}, "1 CPU, zone=z"),
    ],
)
async def test_what_no_node_has_is_said_though_all_together_have_as_much(
    fleet: ActorsOfATest, monkeypatch: pytest.MonkeyPatch, attention: dict[str, Any], lacks: str
) -> None:
    monkeypatch.setattr(placement, "resources", lambda **_: {"CPU": 12.0, "GPU": 3.0})
    arguments = Arguments.model_validate({"settings": {"model": "m"}, "attention": attention})
    waiting = [unit for unit in units(Settings(), schedulers=1) if unit.role == "attention"]
    found = placement.Placement(fleet, arguments).lacking(waiting)  # type: ignore[arg-type]
    assert found == f"attention-0 waits for a node with {lacks}, which no node has"


async def test_what_waits_for_room_does_not_keep_the_rest_from_giving_some(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings(workers=2))
    fleet.initial = "pending"
    await rounds(2, Settings(workers=3))
    other = Settings(workers=3, max_num_seqs=7)
    await rounds(2, other)
    assert fleet.killed == ["attention-2"], "it has not begun, and its successor needs less"
    assert len(fleet.stopped) == 1, "the successor of one that served does not serve yet"
    await rounds(3, other)
    assert len(fleet.stopped) == 1
    for actor in fleet.actors.values():
        actor.state = "ready" if actor.name.startswith(fleet.stopped[0]) else actor.state
    await rounds(3, other)
    assert sorted(fleet.stopped) == ["attention-0", "attention-1"], "attention-2 still waits, and nobody gave way to it"


async def test_a_node_without_room_for_a_pack_is_said(fleet: ActorsOfATest) -> None:
    fleet.initial = "pending"
    settings = Settings(layout="colocated", workers=2)
    rounds = Rounds(fleet)
    await rounds(1, settings)
    (group,) = fleet.groups
    fleet.groups[group] = False
    await rounds(1, settings)
    assert rounds.members.lacking == (
        "colocated-0 waits for one node with room for 2 x (1 CPU and 0 GPU); the largest has 4 CPU and 1 GPU"
    )


async def test_a_pack_is_given_back_with_its_workers_by_a_successor_too(fleet: ActorsOfATest) -> None:
    settings = Settings(layout="colocated", workers=2)
    await Rounds(fleet)(2, settings)
    later = Rounds(fleet)
    await later.members.adopt()
    wanted = units(settings, schedulers=1)[:1]
    for _ in range(3):
        await later.members.round(wanted, settings, "s", later.notices)  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert fleet.groups == {}
    assert sorted(fleet.stopped) == ["colocated-0-0", "colocated-0-1"]


async def test_what_never_began_is_killed_and_nothing_is_left(fleet: ActorsOfATest) -> None:
    fleet.initial = "pending"
    rounds = Rounds(fleet)
    await rounds(2, Settings())
    fleet.actors["attention-9@late"] = Actor("attention-9@late", "a")  # was being started when the loop ended
    await rounds.members.stop_all((("attention",), ("scheduler",)))
    assert (fleet.actors, fleet.stopped) == ({}, [])
    assert sorted(fleet.killed) == ["attention-0", "attention-9", "scheduler-0"]


async def test_an_actor_that_cannot_be_made_is_tried_elsewhere_and_says_why(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    fleet.initial = "pending"
    await rounds(2, Settings())
    (actor,) = (actor for name, actor in fleet.actors.items() if name.startswith("attention"))
    actor.dead = "No module named 'services'"
    await rounds(1, Settings())
    (row,) = [row for row in rounds.members.rows() if row["unit"] == "attention-0"]
    assert (row["state"], row["waits_for"]) == ("failed", "No module named 'services'")
    fleet.initial = "ready"
    await rounds(4, Settings())
    assert rounds.states()["attention-0"] == "ready"
    assert actor.node not in {other.node for name, other in fleet.actors.items() if name.startswith("attention")}


async def test_a_restart_between_two_questions_is_seen(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings())
    actor = next(actor for name, actor in fleet.actors.items() if name.startswith("attention"))
    actor.life = "second"
    await rounds(2, Settings())
    assert rounds.notices.sent == [(7, "attention-0", "h")]


async def test_processes_with_another_model_end_together(fleet: ActorsOfATest) -> None:
    """The queue refuses members of the new one while members of the old one live."""
    rounds = Rounds(fleet)
    one, other = Settings(workers=3, model="one"), Settings(workers=3, model="other")  # type: ignore[arg-type]
    await rounds(2, one)
    await rounds(1, other)
    assert sorted(fleet.stopped) == ["attention-0", "attention-1", "attention-2", "scheduler-0"]


async def test_more_processes_replace_nobody_and_other_resources_all(fleet: ActorsOfATest) -> None:
    rounds = Rounds(fleet)
    await rounds(2, Settings(workers=2))
    await rounds(2, Settings(workers=3))
    assert (fleet.stopped, len(fleet.actors)) == ([], 4)
    later = Members(fleet, Arguments.model_validate(ARGUMENTS.model_dump() | {"attention": {"cpus": 2}}), "app")  # type: ignore[arg-type]
    await later.adopt()
    for _ in range(9):
        wanted = units(Settings(workers=3), schedulers=1)
        await later.round(wanted, Settings(workers=3), "s", rounds.notices)  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert sorted(fleet.stopped) == ["attention-0", "attention-1", "attention-2"]
