"""Events of the plan made real, and the restarter that brings the dead back, as Kubernetes would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from testkit.processes.cluster import Cluster

from chaos.plan import CUT_S, DELAY_S, DELAYED_FOR_S, LEADER, Event

_LOOK_S = 0.1


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
        if event.kind == "cut":
            await self._cut(target)
        elif event.kind == "delay":
            await self._delay(target)
        else:
            await asyncio.to_thread(self._end, event, target)
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

    def _end(self, event: Event, target: str) -> None:
        proc = self.cluster.members[target].proc
        assert proc is not None
        self._asked.add(proc.pid)
        (self.cluster.terminate if event.kind == "leave experts" else self.cluster.kill9)(target)

    async def _cut(self, target: str) -> None:
        cable = self.cluster.members[target].cable
        assert cable is not None, "the plan has cuts only where there are cables"
        await asyncio.to_thread(cable.cut)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            cable.mend()

    async def _delay(self, target: str) -> None:
        cable = self.cluster.members[target].cable
        assert cable is not None, "the plan has delays only where there are cables"
        await asyncio.to_thread(cable.delay, DELAY_S)
        try:
            await asyncio.sleep(DELAYED_FOR_S)
        finally:
            cable.delay(0)

    def _note(self, name: str) -> None:
        proc = self.cluster.members[name].proc
        assert proc is not None
        if proc.pid not in self._asked:
            code = proc.popen.wait()
            self.exits.append(Exit(name=name, code=code, at=time.perf_counter(), tail=proc.log()[-1500:]))
            self.log(f"{name} ended by itself with {code}")
