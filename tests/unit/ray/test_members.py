"""The processes of an application on Ray, with actors that a test makes: spread, replaced, tried elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.config import Settings
from services.ray import members as module
from services.ray.arguments import Arguments, Resources
from services.ray.fleet import Gone, Place
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
    arguments: Mapping[str, Any] = field(default_factory=dict)


class ActorsOfATest:
    """Stands in for :class:`services.ray.fleet.Fleet`. Actors are ready at once, unless ``fails`` says otherwise."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.stopped: list[str] = []
        self.fails: Callable[[str, str], bool] = lambda *_: False

    def names(self) -> list[str]:
        return [*self.actors, "redis"]

    def find(self, name: str) -> Actor:
        return self.actors[name]

    async def secret(self, actor: Actor) -> str:
        return str(actor.arguments.get("secret", ""))

    def start(
        self, name: str, arguments: Mapping[str, Any], _needs: Resources, _gpus: float, place: Place, _env: object
    ) -> Actor:
        assert place.node is not None
        failed = self.fails(arguments["name"], place.node)
        self.actors[name] = Actor(name, place.node, "failed" if failed else "ready", arguments=arguments)
        return self.actors[name]

    async def report(self, actor: Actor) -> Report:
        if actor.gone:
            raise Gone(actor.name)
        state: Any = actor.state
        waits = "the folder does not exist" if state == "failed" else ""
        return Report(state=state, waits_for=waits, host="h", address="1.2.3.4", node=actor.node, pid=7, metrics_port=9)

    async def stop(self, actor: Actor) -> None:
        self.stopped.append(actor.name.partition("@")[0])
        self.actors.pop(actor.name, None)

    def packs(self) -> list[str]:
        return []


class NoticesOfATest:
    def __init__(self) -> None:
        self.sent: list[tuple[int, str, str]] = []

    def ended(self, pid: int, *, name: str, host: str, **_: object) -> None:
        self.sent.append((pid, name.partition("@")[0], host))


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ActorsOfATest:
    listed = [{"NodeID": name, "Labels": {}} for name in ("a", "b", "c")]
    monkeypatch.setattr(module, "nodes", lambda: listed)
    monkeypatch.setattr(module, "resources", lambda **_: {"CPU": 8.0})
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
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
    assert sorted(fleet.stopped) == ["attention-0", "attention-1", "attention-2", "scheduler-0"]
    assert {actor.arguments["settings"]["max_num_seqs"] for actor in fleet.actors.values()} == {7}


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
    monkeypatch.setattr(module, "resources", lambda free=False: {"CPU": 0.5, "GPU": 8.0 if not free else 0.0})

    async def silent(_: Actor) -> None:
        return None

    monkeypatch.setattr(fleet, "report", silent)
    rounds = Rounds(fleet)
    await rounds(1, Settings(workers=2))
    assert rounds.members.lacking == (
        "scheduler-0, attention-0, attention-1 wait for room: there are 0.5 of 2.1 CPU and 0 of 2 GPU free"
    )
