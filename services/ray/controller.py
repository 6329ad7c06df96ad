"""The controller: a Serve deployment of one replica that makes the actors be what the settings and the scheduler want.

Once a second it compares. A unit that is not there is started on the node that has least of its kind, one that is
not wanted is drained and ended, one with other settings is replaced, one at a time. If the controller dies all go on;
its successor finds them by their names. It ends them when its application is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve

from services.config import ATTENTION, COLOCATED, EXPERTS, SCHEDULER, Settings
from services.errors import ConfigError, QueueUnavailable, StartupError
from services.queue.connect import connect
from services.queue.keys import Keys
from services.queue.loads import LoadReader
from services.ray.arguments import Arguments
from services.ray.fleet import REDIS, Fleet, Gone, nodes
from services.ray.gateway import INTRODUCE_S, ends_after_s
from services.ray.members import DRAINS, Members
from services.ray.units import units
from services.runtime import configure_logging
from services.scheduler.scaling.targets import ScalingOptions, Target, unpack_targets
from services.supervisor.notices import Notices

_PAUSE_S = 1.0
_ANSWER_S = 5.0
_LAST_WORDS_S = 10.0
_HEAD = "node:__internal_head__"
"""Ray's name for its head, where Serve's own controller is, too. A private Redis is then not on a node that leaves."""
_STOPPED_IN_TURN = ((ATTENTION, COLOCATED), (EXPERTS,), (SCHEDULER,))
"""Attention drains while its experts answer, and both while a scheduler publishes tables."""
_SILENT_S = 60.0
"""The loop counts as stuck after so long without a round; Serve then starts the controller again."""

log = logging.getLogger(__name__)


class Controller:
    """Keeps the processes of one application. ``arguments`` are those of :class:`Arguments`, as JSON types."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = Arguments.model_validate(dict(arguments))
        self._settings = self._arguments.checked_settings()
        configure_logging("controller", self._settings.log_level, self._settings.log_format)
        self._app = serve.get_replica_context().app_name
        self._fleet = Fleet(self._app)
        self._members = Members(self._fleet, self._arguments, self._app)
        self._targets: dict[Target, int] = {}
        self._gateways: dict[str, tuple[str, float]] = {}
        self._secret = ""
        self._adopted = False
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
        self._gateways[replica] = metrics, asyncio.get_running_loop().time()

    async def overview(self) -> dict[str, Any]:
        """Return what `expertmesh ray status` shows."""
        return {
            "app": self._app,
            "layout": self._settings.layout,
            "model": self._settings.model_name,
            "namespace": self._settings.namespace,
            "lacking": self._members.lacking,
            "targets": {target.name: wanted for target, wanted in self._targets.items()},
            "units": self._members.rows(),
        }

    async def scrape_targets(self) -> list[dict[str, Any]]:
        """Return the pages of all processes, as Prometheus' HTTP service discovery reads them."""
        alive = asyncio.get_running_loop().time() - 3 * INTRODUCE_S
        self._gateways = {replica: noted for replica, noted in self._gateways.items() if noted[1] > alive}
        every = self._members.pages() | {f"gateway-{replica}": page for replica, (page, _) in self._gateways.items()}
        return [{"targets": [page], "labels": {"process": name}} for name, page in sorted(every.items())]

    async def check_health(self) -> None:
        """Raise where the loop has ended or hangs; Serve calls it and starts the controller again."""
        if self._failure is not None and not isinstance(self._failure, StartupError):
            raise RuntimeError("the controller's loop ended") from self._failure
        if self._round_at and asyncio.get_running_loop().time() - self._round_at > _SILENT_S:
            raise RuntimeError(f"the controller's loop has not come round for {_SILENT_S:.0f} s")

    async def __del__(self) -> None:
        """Drain and end all actors if the application is deleted; leave them to a successor otherwise."""
        self._loop_task.cancel()
        await asyncio.wait([self._loop_task])
        if not await asyncio.to_thread(_is_deleted, self._app):
            return
        await asyncio.to_thread(_until_gateways_end, self._app, ends_after_s(self._settings))
        await self._members.stop_all(_STOPPED_IN_TURN)
        with suppress(Gone, ray.exceptions.RayError, TimeoutError):
            redis = self._fleet.find(REDIS)
            async with asyncio.timeout(_LAST_WORDS_S):
                await redis.stop.remote()
            self._fleet.kill(redis)

    async def _run(self) -> None:
        try:
            await self._begin()
            self._up.set()
            url, namespace = str(self._settings.redis_url), self._settings.namespace
            notices, redis = Notices(url, namespace), connect(url, max_connections=1)
            loads = LoadReader(redis, Keys(namespace))
            try:
                while True:
                    await self._round(notices, loads)
                    self._round_at = asyncio.get_running_loop().time()
                    await asyncio.sleep(_PAUSE_S)
            finally:
                await notices.aclose()
                await redis.aclose()
        except Exception as error:
            log.exception("the controller's loop ended")
            self._failure = error
            self._up.set()

    async def identity(self) -> tuple[str, str, bool]:
        """Return the URL of Redis, if it was given, and the namespace in it: two applications may not share both. The
        URL is empty once this one was refused. Last, whether it has processes."""
        given = self._arguments.checked_settings()
        return "" if self._failure else given.redis_url or "", given.namespace, self._members.any

    async def _begin(self) -> None:
        """Find the actors of a predecessor and Redis, or start it. The fabric's secret is that of the actors."""
        self._secret = await self._members.adopt()
        self._adopted = self._members.any
        if not self._adopted:
            await self._check_alone()
        if not self._secret and self._settings.uses_seats and self._settings.fabric_secret_file is None:
            self._secret = secrets.token_urlsafe(32)
        if self._settings.redis_url is None:
            self._settings = self._settings.model_copy(update={"redis_url": await self._embedded()})

    async def _check_alone(self) -> None:
        """Raise ConfigError where another application of the cluster is in the same namespace of the same Redis."""
        url, namespace, _ = await self.identity()
        others = await asyncio.to_thread(lambda: serve.status().applications)
        for name, application in others.items():
            if name == self._app or "Controller" not in application.deployments or not url:
                continue
            with suppress(TimeoutError, ray.exceptions.RayError):
                async with asyncio.timeout(_ANSWER_S):
                    theirs = await serve.get_deployment_handle("Controller", name).identity.remote()
                    same = (theirs[0], theirs[1]) == (url, namespace)
                    if same and (theirs[2] or name < self._app):  # of two that begin together one begins
                        raise ConfigError(
                            f"The application {name} of this cluster serves in namespace {namespace} of this Redis.",
                            hint="Give this one another settings.namespace, or delete that one.",
                        )

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

    async def _round(self, notices: Notices, loads: LoadReader) -> None:
        if not await self._read_targets(loads):
            return
        found = units(self._settings, schedulers=self._arguments.schedulers, targets=self._targets)
        await self._members.round(found, self._settings, self._secret, notices)

    async def _read_targets(self, loads: LoadReader) -> bool:
        """Follow the leading scheduler's targets; those that were read last hold while Redis does not answer. Return
        False where none could be read yet, and processes are there: their numbers are not known to be wrong."""
        if self._settings.autoscale == "off":
            return True
        try:
            ranks = ScalingOptions.of(self._settings).ranks
            self._targets = unpack_targets(await loads.targets(), ranks) or self._targets
            self._adopted = False
        except QueueUnavailable as error:
            log.warning("cannot read the wanted replicas: %s", error.message)
        return not self._adopted


def _until_gateways_end(app: str, limit_s: float) -> None:
    """Return once the application's gateways have drained, or after ``limit_s``: what is in the queue needs workers."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        application = serve.status().applications.get(app)
        gateway = application.deployments.get("Gateway") if application is not None else None
        if gateway is None or not sum(gateway.replica_states.values()):
            return
        time.sleep(_PAUSE_S / 2)


def _is_deleted(app: str) -> bool:
    """Return whether Serve is deleting the application, rather than replacing or moving its controller."""
    status = serve.status().applications.get(app)
    return status is None or status.status == "DELETING"


def controller_of(arguments: Arguments, settings: Settings, class_: type = Controller) -> Any:
    """Return the deployment of ``class_``, bound to its arguments."""
    drain_s = ends_after_s(settings) + 3 * DRAINS * settings.drain_timeout + 60.0  # then attention, experts, schedulers
    deployment = serve.deployment(
        name="Controller",
        num_replicas=1,
        max_ongoing_requests=64,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}}
        | ({"runtime_env": arguments.runtime_env} if arguments.runtime_env else {}),
    )(class_)
    return deployment.bind(arguments.model_dump(mode="json"))
