"""Events of the plan made real, and the restarter that brings the dead back, as Kubernetes would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from testkit.processes.cable import Cable
from testkit.processes.cluster import Cluster

from chaos.history import History
from chaos.plan import CUT_S, DELAY_S, IMPAIRED_S, LEADER, LOST_SHARE, NEED_CABLES, STOPPED_LEASES, Event
from loadgen.events.local import signal_process
from loadgen.events.plan import Action, Planned

_LOOK_S = 0.1
ACTIONS: Mapping[str, Action] = {"kill": "kill", "leave": "drain", "stop": "pause"}
"""By the first word of a fault."""


@dataclass(kw_only=True, slots=True)
class Done:
    """An event that happened: from ``began`` to ``ended`` by ``time.perf_counter``, to whom."""

    event: Event
    target: str
    began: float
    ended: float


@dataclass(kw_only=True, slots=True)
class Exit:
    """A process that ended though nobody had asked it to."""

    name: str
    code: int
    at: float
    tail: str


@dataclass(kw_only=True, slots=True)
class Faults:
    """``log`` gets a line for each event; ``backoff_s``: for so long the dead stay away."""

    cluster: Cluster
    log: Callable[[str], None]
    backoff_s: float = 0.5
    history: History | None = None
    done: list[Done] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set)

    async def follow(self, events: list[Event], start: float) -> None:
        for event in events:
            await asyncio.sleep(max(0.0, start + event.at - time.perf_counter()))
            await self.make(event)

    async def make(self, event: Event) -> None:
        """Returns when the event is over; the dead come back later."""
        target = await self._target(event)
        began = time.perf_counter()
        self.log(f"{event.kind} {target}")
        self._record("fault", event, target)
        if event.kind in NEED_CABLES:
            await self._impair(event, target)
        else:
            await self._signal(event, target)
        self._record("over", event, target)
        self.done.append(Done(event=event, target=target, began=began, ended=time.perf_counter()))

    async def restart(self) -> None:
        """Start processes that end again, until this is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for name, member in self.cluster.members.items():
                if not member.alive:
                    self._note(name)
                    await asyncio.sleep(self.backoff_s)
                    await asyncio.to_thread(self.cluster.start_one, name)

    async def _target(self, event: Event) -> str:
        if event.target != LEADER:
            return event.target
        schedulers = self.cluster.of("scheduler")
        return await asyncio.to_thread(self.cluster.leader) or schedulers[0]

    async def _signal(self, event: Event, target: str) -> None:
        """Do to the process what ``expertmesh-load --event`` does at this word."""
        running, action = self.cluster.members[target].running, ACTIONS[event.kind.partition(" ")[0]]
        if action != "pause":
            self._asked.add(running.pid)
        for_s = STOPPED_LEASES * self.cluster.shape.lease_s
        await signal_process(running.pid, Planned(at_s=event.at, action=action, target=target, for_s=for_s))
        if action == "kill":
            await asyncio.to_thread(running.popen.wait)

    async def _impair(self, event: Event, target: str) -> None:
        cable = self.cluster.members[target].cable
        assert cable is not None, "the plan has these kinds only where there are cables"
        begin, end, seconds = _impairment(cable, event)
        await asyncio.to_thread(begin)
        try:
            await asyncio.sleep(seconds)
        finally:
            end()

    def _record(self, what: Literal["fault", "over"], event: Event, target: str) -> None:
        if self.history is not None:
            self.history.add(what, key=event.kind, target=target)

    def _note(self, name: str) -> None:
        proc = self.cluster.members[name].running
        if proc.pid not in self._asked:
            code = proc.popen.wait()
            self.exits.append(Exit(name=name, code=code, at=time.perf_counter(), tail=proc.log()[-1500:]))
            self.log(f"{name} ended by itself with {code}")


def _impairment(cable: Cable, event: Event) -> tuple[Callable[[], None], Callable[[], None], float]:
    """What begins it, what ends it, and how long it lasts in s."""
    silence, delay, lose = cable.silence, cable.delay, cable.lose
    made: dict[str, tuple[Callable[[], None], Callable[[], None], float]] = {
        "cut": (cable.cut, cable.mend, CUT_S),
        "cut to": (partial(silence, "in"), partial(silence, None), CUT_S),
        "cut from": (partial(silence, "out"), partial(silence, None), CUT_S),
        "delay": (partial(delay, DELAY_S), partial(delay, 0.0), IMPAIRED_S),
        "lose": (partial(lose, LOST_SHARE), partial(lose, 0.0), IMPAIRED_S),
    }
    return made[event.kind]
