"""The controller: a Serve deployment of one replica that makes the actors be what the settings and the scheduler want.

Once a second it compares. A unit that is not there is started on the node that has the fewest of its kind, one that is
not wanted is drained and ended, one with other settings is replaced, one at a time. If the controller dies all go on;
its successor finds them by their names. It ends them when its application is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.util.metrics import Gauge

from services.config import ATTENTION, COLOCATED, EXPERTS, SCHEDULER, Settings
from services.errors import ConfigError, QueueUnavailable, StartupError
from services.queue.connect import command, connect
from services.queue.keys import Keys
from services.ray.arguments import Arguments
from services.ray.fleet import Fleet, Gone, Place, nodes
from services.ray.keeper import Report
from services.ray.units import Unit, digest, units
from services.runtime import configure_logging
from services.scheduler.scaling.targets import ScalingOptions, Target, unpack_targets
from services.supervisor.notices import Notices

_PAUSE_S = 1.0
_HEAD = "node:__internal_head__"
"""Ray's name for its head, where Serve's own controller is, too. A private Redis is then not on a node that leaves."""
_STOPPED_IN_TURN = ((ATTENTION, COLOCATED), (EXPERTS,), (SCHEDULER,))
"""Attention drains while its experts answer, and both while a scheduler publishes tables."""
_SILENT_S = 60.0
"""The loop counts as stuck after so long without a round; Serve then starts the controller again."""

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


class Controller:
    """Keeps the processes of one application. ``arguments`` are those of :class:`Arguments`, as JSON types."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = Arguments.model_validate(dict(arguments))
        self._settings = self._arguments.checked_settings()
        configure_logging("controller", self._settings.log_level, self._settings.log_format)
        self._app = serve.get_replica_context().app_name
        self._fleet = Fleet(self._app)
        self._members: dict[str, Member] = {}
        self._wanted: dict[str, Unit] = {}
        self._targets: dict[Target, int] = {}
        self._gateways: dict[str, str] = {}
        self._secret = ""
        self._lacking = ""
        self._gauges = _Gauges()
        self._up = asyncio.Event()
        self._round_at = 0.0
        self._failure: Exception | None = None
        self._loop_task = asyncio.ensure_future(self._run())

    async def redis_url(self) -> str:
        """Return the URL of Redis, as soon as it is known. Raises StartupError where there can be none."""
        await self._up.wait()
        if isinstance(self._failure, StartupError):
            raise self._failure
        assert self._settings.redis_url is not None
        return self._settings.redis_url

    async def introduce(self, replica: str, metrics: str) -> None:
        """Note the address of the metrics page of a gateway's replica."""
        self._gateways[replica] = metrics

    async def overview(self) -> dict[str, Any]:
        """Return what `expertmesh ray status` shows."""
        known = {member.name: member for member in self._members.values()}
        return {
            "app": self._app,
            "layout": self._settings.layout,
            "model": self._settings.model_name,
            "lacking": self._lacking,
            "targets": {target.name: wanted for target, wanted in self._targets.items()},
            "units": [self._row(name, known.get(name)) for name in sorted(self._wanted.keys() | known.keys())],
        }

    async def scrape_targets(self) -> list[dict[str, Any]]:
        """Return the pages of all processes, as Prometheus' HTTP service discovery reads them."""
        pages = {
            member.name.partition("@")[0]: f"{member.said.address}:{member.said.metrics_port}"
            for member in self._members.values()
            if member.said is not None and member.said.metrics_port
        }
        every = pages | {f"gateway-{replica}": page for replica, page in self._gateways.items()}
        return [{"targets": [page], "labels": {"role": name}} for name, page in sorted(every.items())]

    async def check_health(self) -> None:
        """Raise where the loop has ended or hangs; Serve calls it and starts the controller again."""
        if self._failure is not None and not isinstance(self._failure, StartupError):
            raise RuntimeError("the controller's loop ended") from self._failure
        if self._round_at and asyncio.get_running_loop().time() - self._round_at > _SILENT_S:
            raise RuntimeError(f"the controller's loop has not come round for {_SILENT_S:.0f} s")

    async def __del__(self) -> None:
        """Drain and end all actors if the application is deleted; leave them to a successor otherwise."""
        self._loop_task.cancel()
        if not await asyncio.to_thread(_is_deleted, self._app):
            return
        for roles in _STOPPED_IN_TURN:
            leaving = [member for member in self._members.values() if member.name.startswith(roles)]
            await asyncio.gather(*(self._fleet.stop(member.handle) for member in leaving))
        for name in self._fleet.packs():
            self._fleet.unpack(name)
        with suppress(Gone):
            self._fleet.kill(self._fleet.find("redis"))

    async def _run(self) -> None:
        try:
            await self._begin()
            self._up.set()
            notices = Notices(str(self._settings.redis_url), self._settings.namespace)
            try:
                while True:
                    await self._round(notices)
                    self._round_at = asyncio.get_running_loop().time()
                    await asyncio.sleep(_PAUSE_S)
            finally:
                await notices.aclose()
        except Exception as error:
            log.exception("the controller's loop ended")
            self._failure = error
            self._up.set()

    async def _begin(self) -> None:
        """Find the actors of a predecessor and Redis, or start it. The fabric's secret is that of the actors."""
        for name in await asyncio.to_thread(self._fleet.names):
            if name != "redis":
                self._members[name] = Member(name, self._fleet.find(name))
        for member in self._members.values():
            with suppress(Exception):
                async with asyncio.timeout(_PAUSE_S):
                    self._secret = self._secret or await member.handle.secret.remote()
        if not self._secret and self._settings.uses_seats and self._settings.fabric_secret_file is None:
            self._secret = secrets.token_urlsafe(32)
        if self._settings.redis_url is None:
            self._settings = self._settings.model_copy(update={"redis_url": await self._embedded()})

    async def _embedded(self) -> str:
        """Start a Redis for the application, or find it, and return its URL. It is on a socket of one machine."""
        machines = {node["NodeManagerHostname"] for node in nodes()}
        if len(machines) > 1:
            raise ConfigError(
                f"The Ray cluster has {len(machines)} machines, and settings.redis_url is missing.",
                hint="The private Redis serves one machine only: run one that all nodes reach, and give its URL.",
            )
        folder = f"{tempfile.gettempdir()}/expertmesh-ray-{secrets.token_hex(4)}"
        url: str = await self._fleet.start_redis(folder).url.remote()
        return url

    async def _round(self, notices: Notices) -> None:
        await self._read_targets()
        found = units(self._settings, schedulers=self._arguments.schedulers, targets=self._targets)
        self._wanted = {f"{unit.name}@{digest(self._settings, unit)}": unit for unit in found}
        await asyncio.gather(*(self._ask(member, notices) for member in list(self._members.values())))
        self._end_surplus()
        await self._start_missing()
        self._note()

    async def _read_targets(self) -> None:
        """Follow the leading scheduler's targets. Those that were read last hold while Redis does not answer."""
        if self._settings.autoscale == "off":
            return
        redis = connect(str(self._settings.redis_url))
        try:
            kept = await command(redis, "GET", Keys(self._settings.namespace).targets)
            ranks = ScalingOptions.of(self._settings).ranks
            self._targets = unpack_targets(kept, ranks) or self._targets
        except QueueUnavailable as error:
            log.warning("cannot read the wanted replicas: %s", error.message)
        finally:
            await redis.aclose()

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
        busy = any(member.leaving for member in surplus) or not self._all_ready()
        for member in surplus:
            if member.leaving is not None:
                continue
            if member.name.partition("@")[0] in replaced:
                if busy:
                    continue
                busy = True
            member.leaving = asyncio.ensure_future(self._leave(member))

    def _all_ready(self) -> bool:
        present = [self._members[name] for name in self._wanted if name in self._members]
        return all(member.said is not None and member.said.state == "ready" for member in present)

    async def _leave(self, member: Member) -> None:
        log.info("%s drains and ends", member.name)
        await self._fleet.stop(member.handle)
        self._members.pop(member.name, None)

    async def _start_missing(self) -> None:
        """Start what is wanted and not there, unless a predecessor with other settings has not left yet."""
        held = {member.name.partition("@")[0] for member in self._members.values()}
        packs = {unit.pack for unit in self._wanted.values()}
        for name in self._fleet.packs():
            if name not in packs and not any(member.name.startswith(f"{name}-") for member in self._members.values()):
                self._fleet.unpack(name)
        for name, unit in self._wanted.items():
            if unit.name not in held:
                place = self._place(unit)
                handle = await asyncio.to_thread(self._started, name, unit, place)
                self._members[name] = Member(name, handle, sent_to=place.node or "")
        self._lacking = await asyncio.to_thread(self._missing_resources)

    def _started(self, name: str, unit: Unit, place: Place) -> Any:
        resources = self._arguments.resources_of(unit.role)
        arguments = {
            "name": unit.name,
            "role": unit.role,
            "settings": self._settings.model_dump(mode="json") | dict(unit.changes),
            "secret": self._secret,
        }
        log.info("starting %s", name)
        return self._fleet.start(
            name, arguments, resources, self._gpus(unit), place, self._arguments.runtime_env
        )

    def _gpus(self, unit: Unit) -> float:
        asked = self._arguments.resources_of(unit.role).gpus
        if asked is not None:
            return asked
        on_gpu = self._settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        return 1.0 if on_gpu else 0.0

    def _place(self, unit: Unit) -> Place:
        """Return where ``unit`` is to run: packed with its like, or on the node with the fewest of its kind."""
        resources = self._arguments.resources_of(unit.role)
        if unit.pack is not None:
            bundle = {"CPU": resources.cpus, "GPU": self._gpus(unit)} | resources.resources
            bundle = {name: amount for name, amount in bundle.items() if amount}
            group = self._fleet.pack(unit.pack, bundle, self._settings.workers)
            return Place(pack=group, bundle=int(unit.name.rpartition("-")[2]))
        return Place(node=self._emptiest(unit))

    def _emptiest(self, unit: Unit) -> str | None:
        """Return the node that has the fewest units of the same kind, and among these the fewest of all."""
        alike: Counter[str] = Counter()
        every: Counter[str] = Counter()
        for name, member in self._members.items():
            other, node = self._wanted.get(name), member.node
            every[node] += 1
            alike[node] += other is not None and other.kind == unit.kind
        labels = self._arguments.resources_of(unit.role).labels
        fit = [node["NodeID"] for node in nodes() if _has_labels(node, labels)]
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
        free = ray.available_resources()
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
            self._wanted[name].kind
            for name, member in self._members.items()
            if name in self._wanted and member.said is not None and member.said.state == "ready"
        )
        for kind, count in kinds.items():
            self._gauges.wanted.set(count, {"app": self._app, "kind": kind})
            self._gauges.ready.set(ready[kind], {"app": self._app, "kind": kind})
        self._gauges.restarts.set(sum(member.restarts for member in self._members.values()), {"app": self._app})

    def _row(self, name: str, member: Member | None) -> dict[str, Any]:
        said = member.said if member is not None else None
        state = said.state if said is not None else "waiting"
        if member is not None and member.leaving is not None:
            state = "leaving"
        elif member is not None and member.gone:
            state = "died"
        return {
            "unit": name.partition("@")[0],
            "state": state,
            "waits_for": said.waits_for if said is not None else "",
            "node": f"{said.address}/{said.node[:8]}" if said is not None else "",
            "pid": said.pid if said is not None else None,
            "starts": said.starts if said is not None else 0,
            "restarts": member.restarts if member is not None else 0,
        }


def _is_deleted(app: str) -> bool:
    """Return whether Serve is deleting the application, rather than replacing or moving its controller."""
    status = serve.status().applications.get(app)
    return status is None or status.status == "DELETING"


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    known = node.get("Labels") or {}
    return all(known.get(name) == value for name, value in labels.items())


def controller_of(arguments: Arguments, settings: Settings) -> Any:
    """Return the deployment, bound to its arguments."""
    drain_s = 4 * settings.drain_timeout + 30.0
    deployment = serve.deployment(
        name="Controller",
        num_replicas=1,
        max_ongoing_requests=64,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}}
        | ({"runtime_env": arguments.runtime_env} if arguments.runtime_env else {}),
    )(Controller)
    return deployment.bind(arguments.model_dump(mode="json"))

