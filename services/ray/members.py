"""The processes of an application, each behind its actor: those that are wanted are started, others end.

A unit that is not there is started on the node that has least of its kind, one that is not wanted is drained and
ended, and one with other settings is replaced, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.util.metrics import Gauge

from services.config import Settings
from services.ray.arguments import Arguments
from services.ray.fleet import Fleet, Gone, Place, nodes, resources
from services.ray.keeper import Report
from services.ray.units import Unit, digest
from services.supervisor.notices import Notices

_RETRY_S = 15.0
"""A process that failed for good, such as one whose node lacks the checkpoint, is then tried again elsewhere."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """An actor. ``said`` is its last report, ``restarts`` how often Ray has started it again as far as was seen, and
    ``sent_to`` the node that it was meant for."""

    name: str
    handle: Any
    sent_to: str = ""
    said: Report | None = None
    leaving: asyncio.Task[None] | None = None
    gone: bool = False
    restarts: int = 0
    failed_at: float | None = None

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.name.partition("@")[0]

    @property
    def ready(self) -> bool:
        """Whether the process said last that it serves."""
        return self.said is not None and self.said.state == "ready" and not self.gone

    @property
    def node(self) -> str:
        """Id of the node on which the actor runs or was meant to run."""
        return self.said.node if self.said is not None else self.sent_to


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
        self._failed_on: dict[str, set[str]] = {}
        self._failures: dict[str, str] = {}
        self._gauges = _Gauges()
        self.lacking = ""
        """Which units Ray has no room for, and what they need; empty: none."""

    async def adopt(self) -> str:
        """Find the actors of an earlier controller. Returns the fabric's secret, which they know; empty: none does."""
        for name in await asyncio.to_thread(self._fleet.names):
            if name != "redis":
                self._members[name] = Member(name, self._fleet.find(name))
        answers = [await self._fleet.secret(member.handle) for member in self._members.values()]
        return next(filter(None, answers), "")

    async def round(self, wanted: list[Unit], settings: Settings, secret: str, notices: Notices) -> None:
        """Ask all, end what is not wanted, and start what is missing. ``settings`` are those of all processes."""
        self._wanted = {f"{unit.name}@{digest(settings, unit)}": unit for unit in wanted}
        await asyncio.gather(*(self._ask(member, notices) for member in list(self._members.values())))
        self._end_surplus()
        self._end_failed()
        await self._start_missing(settings, secret)
        self._note()

    async def stop_all(self, turns: tuple[tuple[str, ...], ...]) -> None:
        """Drain and end all, the roles of one turn after those of the other."""
        for roles in turns:
            leaving = [member for member in self._members.values() if member.name.startswith(roles)]
            await asyncio.gather(*(self._fleet.stop(member.handle) for member in leaving))
        for name in self._fleet.packs():
            self._fleet.unpack(name)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each unit that is wanted or there."""
        return [self._row(name, self._members.get(name)) for name in sorted(self._wanted.keys() | self._members.keys())]

    def pages(self) -> dict[str, str]:
        """Return unit -> address of its metrics page."""
        return {
            member.unit: f"{member.said.address}:{member.said.metrics_port}"
            for member in self._members.values()
            if member.said is not None and member.said.metrics_port
        }

    async def _ask(self, member: Member, notices: Notices) -> None:
        try:
            said = await self._fleet.report(member.handle)
        except Gone:
            self._lost(member, notices)
            return
        if said is not None:
            member.gone = False
            member.said = said

    def _lost(self, member: Member, notices: Notices) -> None:
        """Report at once that the process of an actor that died has ended: nobody waits for its lease."""
        if member.gone:
            return
        member.gone = True
        member.restarts += 1
        said = member.said
        if said is not None and said.pid is not None:
            log.warning("the actor of %s has died; Ray starts it again", member.name)
            notices.ended(said.pid, name=member.name, metrics_port=said.metrics_port, host=said.host)

    def _end_surplus(self) -> None:
        """Drain units that are not wanted. Of those that only have other settings now, one at a time is replaced."""
        surplus = [member for name, member in self._members.items() if name not in self._wanted]
        replaced = {unit.name for unit in self._wanted.values()}
        busy = any(member.leaving for member in surplus) or not self._settled()
        for member in sorted(surplus, key=lambda member: member.ready):  # those that do not serve first
            if member.leaving is not None:
                continue
            if member.unit in replaced:
                if busy:
                    continue
                busy = True
            member.leaving = asyncio.ensure_future(self._leave(member))

    def _end_failed(self) -> None:
        """End actors whose process failed for good, and remember where that was: the next try is elsewhere."""
        now = asyncio.get_running_loop().time()
        for member in list(self._members.values()):
            said = member.said
            if said is None or said.state != "failed":
                member.failed_at = None
                continue
            if member.failed_at is None:
                member.failed_at = now
                log.error("%s failed on node %s: %s", member.name, said.address, said.waits_for)
                self._failures[member.name] = said.waits_for
            elif now - member.failed_at > _RETRY_S and member.leaving is None:
                self._failed_on.setdefault(member.unit, set()).add(said.node)
                member.leaving = asyncio.ensure_future(self._leave(member))

    def _settled(self) -> bool:
        """Return whether each unit that is wanted is ready, or runs with the settings that it had before."""
        held = {member.unit for member in self._members.values()}
        found = [(unit, self._members.get(name)) for name, unit in self._wanted.items()]
        return all(unit.name in held if member is None else member.ready for unit, member in found)

    async def _leave(self, member: Member) -> None:
        log.info("%s drains and ends", member.name)
        await self._fleet.stop(member.handle)
        self._members.pop(member.name, None)

    async def _start_missing(self, settings: Settings, secret: str) -> None:
        """Start what is wanted and not there, unless a predecessor with other settings has not left yet."""
        held = {member.unit for member in self._members.values()}
        packs = {unit.pack for unit in self._wanted.values()}
        for name in self._fleet.packs():
            if name not in packs and not any(member.name.startswith(f"{name}-") for member in self._members.values()):
                self._fleet.unpack(name)
        for name, unit in self._wanted.items():
            if unit.name not in held:
                place = self._place(unit, settings)
                handle = await asyncio.to_thread(self._started, name, unit, place, settings, secret)
                self._members[name] = Member(name, handle, sent_to=place.node or "")
        self.lacking = await asyncio.to_thread(self._missing_resources)

    def _started(self, name: str, unit: Unit, place: Place, settings: Settings, secret: str) -> Any:
        needs = self._arguments.resources_of(unit.role)
        arguments = {
            "name": unit.name,
            "role": unit.role,
            "settings": settings.model_dump(mode="json") | dict(unit.changes),
            "secret": secret,
        }
        log.info("starting %s", name)
        return self._fleet.start(name, arguments, needs, self._gpus(unit), place, self._arguments.runtime_env)

    def _gpus(self, unit: Unit) -> float:
        asked = self._arguments.resources_of(unit.role).gpus
        if asked is not None:
            return asked
        on_gpu = self._arguments.settings.get("device") != "cpu" and resources().get("GPU", 0) > 0
        return 1.0 if on_gpu else 0.0

    def _place(self, unit: Unit, settings: Settings) -> Place:
        """Return where ``unit`` is to run: packed with its like, or on the node with least of its kind."""
        needs = self._arguments.resources_of(unit.role)
        if unit.pack is not None:
            bundle = {"CPU": needs.cpus, "GPU": self._gpus(unit)} | needs.resources
            bundle = {name: amount for name, amount in bundle.items() if amount}
            group = self._fleet.pack(unit.pack, bundle, settings.workers)
            return Place(pack=group, bundle=int(unit.name.rpartition("-")[2]))
        return Place(node=self._emptiest(unit))

    def _emptiest(self, unit: Unit) -> str | None:
        """Return the node that has least units of the same kind, and among these least of all."""
        alike: Counter[str] = Counter()
        every: Counter[str] = Counter()
        for name, member in self._members.items():
            other, node = self._wanted.get(name), member.node
            every[node] += 1
            alike[node] += other is not None and other.kind == unit.kind
        labels = self._arguments.resources_of(unit.role).labels
        fit = [node["NodeID"] for node in nodes() if _has_labels(node, labels)]
        failed = self._failed_on.get(unit.name, set())
        fit = [node for node in fit if node not in failed] or fit
        return min(fit, key=lambda node: (alike[node], every[node], node), default=None)

    def _missing_resources(self) -> str:
        """Return which units Ray has no room for, and what they need; empty: none."""
        waiting = [
            self._wanted[name]
            for name, member in self._members.items()
            if name in self._wanted and member.said is None and not member.gone
        ]
        if not waiting:
            return ""
        free = resources(free=True)
        needs: Counter[str] = Counter()
        for unit in waiting:
            needs.update({"CPU": self._arguments.resources_of(unit.role).cpus, "GPU": self._gpus(unit)})
        lacks = {name: need for name, need in needs.items() if need > free.get(name, 0)}
        short = [f"{free.get(name, 0):g} of {need:g} {name}" for name, need in lacks.items()]
        if not short:
            return ""
        return f"{', '.join(unit.name for unit in waiting)} wait for room: there are {' and '.join(short)} free"

    def _note(self) -> None:
        kinds = Counter(unit.kind for unit in self._wanted.values())
        ready = Counter(
            self._wanted[name].kind for name, member in self._members.items() if name in self._wanted and member.ready
        )
        for kind, count in kinds.items():
            self._gauges.wanted.set(count, {"app": self._app, "kind": kind})
            self._gauges.ready.set(ready[kind], {"app": self._app, "kind": kind})
        self._gauges.restarts.set(sum(member.restarts for member in self._members.values()), {"app": self._app})

    def _row(self, name: str, member: Member | None) -> dict[str, Any]:
        said = member.said if member is not None else None
        state: str = said.state if said is not None else "waiting"
        if member is not None and member.leaving is not None:
            state = "leaving"
        elif member is not None and member.gone:
            state = "died"
        waits_for = said.waits_for if said is not None else ""
        return {
            "unit": name.partition("@")[0],
            "state": state,
            "waits_for": waits_for or (self._failures.get(name, "") if state != "ready" else ""),
            "node": f"{said.address}/{said.node[:8]}" if said is not None else "",
            "pid": said.pid if said is not None else None,
            "starts": said.starts if said is not None else 0,
            "restarts": member.restarts if member is not None else 0,
        }


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    known = node.get("Labels") or {}
    return all(known.get(name) == value for name, value in labels.items())
