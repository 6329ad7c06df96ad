"""The processes of an application, each behind its actor: those that are wanted are started, others end.

A unit that is not there is started on the node that has least of its kind, one that is not wanted is drained and
ended, and one with other settings is replaced, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.util.metrics import Gauge

from services.config import Settings
from services.ray.arguments import Arguments, handed_over
from services.ray.fleet import REDIS, Fleet, Gone, Place, Unavailable
from services.ray.keeper import Report
from services.ray.member import Member, row
from services.ray.placement import Placement
from services.ray.units import Unit, digest, model_digest
from services.supervisor.notices import Notices

_PAUSE_S = 1.0
_AGAIN_S = 0.2
DRAINS = 4
"""How many drains a process may take to end: three, and a margin."""
_MARGIN_S = 30.0
_RETRY_S = 15.0
"""A process that failed for good, such as one whose node lacks the checkpoint, is then tried again elsewhere."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gauges:
    wanted: Gauge = field(default_factory=lambda: Gauge("expertmesh_ray_wanted", "Processes wanted.", ("app", "kind")))
    ready: Gauge = field(default_factory=lambda: Gauge("expertmesh_ray_ready", "Processes ready.", ("app", "kind")))
    restarts: Gauge = field(
        default_factory=lambda: Gauge("expertmesh_ray_restarts", "Actors that Ray started again.", ("app",))
    )


class Members:
    """Members by name: a unit's, and the digest of its settings."""

    def __init__(self, fleet: Fleet, arguments: Arguments, app: str) -> None:
        self._fleet, self._arguments, self._app = fleet, arguments, app
        self._members: dict[str, Member] = {}
        self._wanted: dict[str, Unit] = {}
        self._placement = Placement(fleet, arguments)
        self._failures: dict[str, str] = {}
        self._given_up: set[str] = set()
        """Units whose process was ended for one with other settings that does not serve yet."""
        self._gauges = _Gauges()
        self._drain_s = _MARGIN_S
        self.lacking = ""
        """Which units Ray has no room for, and what they need; empty: none."""

    async def adopt(self) -> str:
        """Find the actors of an earlier controller. Returns the fabric's secret, which they know; empty: there are
        none, or none that has one. While none of them answers it waits: another secret would part old and new ones."""
        for name in await asyncio.to_thread(self._fleet.names):
            with suppress(Gone):
                if name != REDIS:
                    self._members[name] = Member(name, self._fleet.find(name))
        while True:
            answers = await asyncio.gather(*(self._fleet.secret(member.handle) for member in self._members.values()))
            known = [answer for answer in answers if answer is not None]
            if known or not answers:
                return next(filter(None, known), "")
            log.warning("none of the %d processes that are there answers", len(answers))
            await asyncio.sleep(_PAUSE_S)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._members)

    async def round(self, wanted: list[Unit], settings: Settings, secret: str, notices: Notices) -> None:
        """Ask all, end what is not wanted, and start what is missing. ``settings`` are those of all processes."""
        self._drain_s = DRAINS * settings.drain_timeout + _MARGIN_S
        self._wanted = {
            f"{unit.name}@{digest(settings, unit, self._placement.reserved(unit))}": unit for unit in wanted
        }
        await self._ask_all(notices)
        self._end_surplus(model_digest(settings))
        self._end_failed()
        await self._start_missing(settings, secret)
        self._note()

    async def stop_all(self, turns: tuple[tuple[str, ...], ...]) -> None:
        """Drain and end all, the roles of one turn after those of the other."""
        for roles in turns:
            leaving = [member for member in self._members.values() if member.name.startswith(roles)]
            await asyncio.gather(*map(self._end, leaving))
        for name in await asyncio.to_thread(self._fleet.names):  # also what was being started just now
            with suppress(Gone):
                if name != REDIS:
                    self._fleet.kill(self._fleet.find(name))
        for name in await asyncio.to_thread(self._fleet.packs):
            self._fleet.unpack(name)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each unit that is wanted or there."""
        names = sorted(self._wanted.keys() | self._members.keys())
        return [row(name, self._members.get(name), self._failures.get(name, "")) for name in names]

    def pages(self) -> dict[str, str]:
        """Return unit -> address of its metrics page."""
        return {
            member.unit: f"{member.said.address}:{member.said.metrics_port}"
            for member in self._members.values()
            if member.said is not None and member.said.metrics_port
        }

    async def _ask_all(self, notices: Notices) -> None:
        """Have all report. Those that take longer, because they are not there yet, do not hold others up."""
        for member in self._members.values():
            if member.asking is None or member.asking.done():
                member.asking = asyncio.create_task(self._ask(member, notices))
        asking = [member.asking for member in self._members.values() if member.asking is not None]
        if asking:
            await asyncio.wait(asking, timeout=_PAUSE_S)

    async def _ask(self, member: Member, notices: Notices) -> None:
        try:
            said = await self._report(member)
        except Gone as error:
            self._lost(member, notices)
            member.ended = member.ended or str(error)
            return
        except Unavailable:
            self._lost(member, notices)
            return
        if said is None:
            return
        if member.said is not None and member.said.life != said.life:  # Ray was faster than the question
            self._lost(member, notices)
        member.gone, member.said = False, said

    async def _report(self, member: Member) -> Report | None:
        """Ask, and once more where the actor does not answer: a network that stutters is no death."""
        try:
            return await self._fleet.report(member.handle)
        except Unavailable:
            await asyncio.sleep(_AGAIN_S)
            return await self._fleet.report(member.handle)

    def _lost(self, member: Member, notices: Notices) -> None:
        """Report at once that the process of an actor that died has ended: nobody waits for its lease."""
        if member.gone:
            return
        member.gone = True
        member.restarts += 1
        said = member.said
        if said is not None and said.pid is not None:
            log.warning("the actor of %s has died", member.name)
            notices.ended(said.pid, name=member.name, metrics_port=said.metrics_port, host=said.host)

    def _end_surplus(self, model: str) -> None:
        """Drain units that are not wanted. Of those that only have other settings now, one at a time is replaced; those
        that wait for room serve nobody and end at once, and those with another model end together, since none of the
        new one may begin before."""
        surplus = [member for name, member in self._members.items() if name not in self._wanted]
        replaced = {unit.name for unit in self._wanted.values()}
        busy = any(member.leaving and not member.waits for member in surplus) or not self._settled()
        for member in sorted(surplus, key=lambda member: member.ready):  # those that do not serve first
            if member.leaving is not None:
                continue
            if member.unit in replaced and member.digest.startswith(model) and not member.waits:
                if busy:
                    continue
                busy = True
                self._given_up.add(member.unit)
            member.leaving = asyncio.create_task(self._leave(member))

    def _end_failed(self) -> None:
        """End actors whose process failed for good, and remember where that was: the next try is elsewhere."""
        now = asyncio.get_running_loop().time()
        for member in list(self._members.values()):
            said, why = member.said, member.ended
            if why is None and said is not None and said.state == "failed":
                why = said.waits_for
            if why is None:
                member.failed_at = None
            elif member.failed_at is None:
                member.failed_at = now
                log.error("%s failed on node %s: %s", member.name, said.address if said else member.node, why)
                self._failures[member.name] = why
            elif now - member.failed_at > _RETRY_S and member.leaving is None:
                self._placement.failed_on.setdefault(member.unit, set()).add(member.node)
                member.leaving = asyncio.create_task(self._leave(member))

    def _settled(self) -> bool:
        """Return whether each unit that is wanted is ready, runs with the settings that it had before, or waits for
        room that nobody gave up for it: replacing others may make some."""
        held = {member.unit for member in self._members.values()}
        found = [(unit, self._members.get(name)) for name, unit in self._wanted.items()]
        self._given_up -= {unit.name for unit, member in found if member is not None and member.ready}
        return all(
            unit.name in held if member is None else member.ready or (member.waits and unit.name not in self._given_up)
            for unit, member in found
        )

    async def _leave(self, member: Member) -> None:
        log.info("%s drains and ends", member.name)
        await self._end(member)
        self._members.pop(member.name, None)

    async def _end(self, member: Member) -> None:
        """Drain a member's process and end its actor. One that never reported has no process, and does not hear."""
        if member.said is None or member.ended is not None:
            self._fleet.kill(member.handle)
        else:
            await self._fleet.stop(member.handle, self._drain_s)

    async def _start_missing(self, settings: Settings, secret: str) -> None:
        """Start what is wanted and not there, unless a predecessor with other settings has not left yet."""
        held = {member.unit for member in self._members.values()}
        await self._unpack(held)
        for name, unit in self._wanted.items():
            if unit.name not in held:
                place = self._placement.place(unit, settings, self._spread())
                handle = await asyncio.to_thread(self._started, name, unit, place, settings, secret)
                self._members[name] = Member(name, handle, sent_to=place.node or "")
        waiting = [
            self._wanted[name] for name, member in self._members.items() if name in self._wanted and member.waits
        ]
        self.lacking = await asyncio.to_thread(self._placement.lacking, waiting)

    def _spread(self) -> list[tuple[Unit | None, str]]:
        return [(self._wanted.get(name), member.node) for name, member in self._members.items()]

    async def _unpack(self, held: set[str]) -> None:
        """Give placement groups back whose workers are neither wanted nor there."""
        wanted = {self._placement.pack_of(unit) for unit in self._wanted.values()}
        for name in await asyncio.to_thread(self._fleet.packs):
            if name not in wanted and not any(unit.startswith(f"{name.partition('@')[0]}-") for unit in held):
                self._fleet.unpack(name)

    def _started(self, name: str, unit: Unit, place: Place, settings: Settings, secret: str) -> Any:
        needs = self._arguments.resources_of(unit.role)
        arguments = {
            "name": unit.name,
            "role": unit.role,
            "settings": handed_over(settings) | dict(unit.changes),
            "secret": secret,
        }
        log.info("starting %s", name)
        return self._fleet.start(name, arguments, needs, self._placement.gpus(unit), place, self._arguments.runtime_env)

    def _note(self) -> None:
        kinds = Counter(unit.kind for unit in self._wanted.values())
        ready = Counter(
            self._wanted[name].kind for name, member in self._members.items() if name in self._wanted and member.ready
        )
        for kind, count in kinds.items():
            self._gauges.wanted.set(count, {"app": self._app, "kind": kind})
            self._gauges.ready.set(ready[kind], {"app": self._app, "kind": kind})
        self._gauges.restarts.set(sum(member.restarts for member in self._members.values()), {"app": self._app})
