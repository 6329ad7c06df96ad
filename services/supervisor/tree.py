"""Brings up Redis, gateway, scheduler and workers as one process tree, and takes it down in order.

Out to the children: a configuration file each, and SIGTERM. Back: exit codes, and the gateway's /ready. How often each
was started is on a page of metrics that the gateway merges into its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import httpx
from prometheus_client import CollectorRegistry, disable_created_metrics

from services.config import ATTENTION, COLOCATED, EXPERTS, GATEWAY, Role, Settings, require
from services.errors import ConfigError, StartupError
from services.gateway.auth import keys_required
from services.metrics import ServerMetrics
from services.model.hub import with_checkpoint
from services.runtime import MetricsServer, configure_logging, run_process, show_build
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder
from services.runtime.tracing import check_tracing
from services.supervisor.child import Outlook, RedisProcess
from services.supervisor.children import COMMANDS, Children
from services.supervisor.handover import base_url, check_port, held_ports
from services.supervisor.notices import Notices
from services.supervisor.policy import RestartPolicy
from services.supervisor.preflight import Preview, preflight
from services.supervisor.roster import COMPUTING, computing, device_of

_READY_POLL_S = 0.1
_READY_NOTE_S = 15.0
_REDIS, _SERVE = "redis", "serve"
_LOOPBACK = "127.0.0.1"

OnReady = Callable[[str, str | None], Awaitable[None]]
log = logging.getLogger(__name__)


def serve(settings: Settings, *, on_ready: OnReady | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code. ``on_ready`` gets the base URL as soon as it answers, and
    the API key that clients need, if it is of the settings or was made."""
    configure_logging(_SERVE, settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as in every role
    try:
        settings = _with_checkpoint(settings)
    except StartupError as error:
        log.error("%s", error.message)
        return error.exit_code
    supervisor = Supervisor(settings, on_ready=on_ready)
    return run_process(supervisor.run, force=supervisor.kill)


def _with_checkpoint(settings: Settings) -> Settings:
    """Return ``settings`` with the checkpoint's folder. What refuses them is found before anything is downloaded."""
    require(settings, None)
    check_port(settings.host, settings.port)
    return with_checkpoint(settings)


def _with_traces(settings: Settings, folder: RunFolder) -> Settings:
    """Return ``settings`` with a place for traces, if they are wanted and have none: a folder that ends with the
    server."""
    if not settings.traces_wanted:
        return settings
    given = settings.trace_folder
    if given is None and settings.traces_have_a_place:
        return settings
    place = folder.path / "traces" if given is None else given.absolute()
    log.info("traces in %s; `expertmesh trace REQUEST_ID` shows one", place)
    return settings.model_copy(update={"trace_folder": place})


class Supervisor:
    """Supervisor of one server. ``commands`` and ``check`` tie it to the real roles."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_ready: OnReady | None = None,
        commands: Mapping[Role, Sequence[str]] = COMMANDS,
        check: Callable[[Settings], Preview | None] = preflight,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
        stop_margin_s: float = 5.0,
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._key: str | None = None
        self._commands = commands
        self._preflight = check
        self._preview: Preview | None = None
        self._children = Children(commands, new_policy=new_policy, stop_margin_s=stop_margin_s)
        self._notices: Notices | None = None
        registry = CollectorRegistry()
        show_build(registry, _SERVE)
        self._starts = ServerMetrics(registry).starts
        self._page = MetricsServer(registry)

    async def run(self, stop: asyncio.Event) -> int:
        """Start everything, wait for ``stop`` or for a child that cannot be kept alive, stop everything.

        Raises:
            StartupError: the model folder or the address is unusable, or Redis does not start.
        """
        port = self._check()
        for line in self._preview.lines() if self._preview else []:
            log.info("%s", line)
        with RunFolder() as folder, ExitStack() as ports:
            try:
                await self._start(folder, port, ports)
                code = await self._children.watch(stop, self._announce(base_url(self._settings.host, port)))
                if stop.is_set():
                    print("stopping when open requests have ended; a second Ctrl-C stops at once", flush=True)
            finally:
                await self._page.close()
                if self._notices is not None:
                    await self._notices.aclose()
                await self._children.stop(self._settings)
        return self._children.exit_code(code)

    def kill(self) -> None:
        """End all children at once; :meth:`run` then returns soon."""
        self._children.kill()

    def _check(self) -> int:
        """Check, before anything is loaded, what would make the roles fail. Returns the port of the REST API."""
        if self._settings.model is None:
            raise ConfigError(
                "No model is given.",
                hint="Give a checkpoint's folder or ORG/NAME of the Hugging Face Hub: expertmesh serve MODEL.",
            )
        require(self._settings, None)
        check_tracing(self._settings)
        port = check_port(self._settings.host, self._settings.port)
        self._preview = self._preflight(self._settings)
        return port

    async def _start(self, folder: RunFolder, port: int, ports: ExitStack) -> None:
        redis_url = self._settings.redis_url or await self._start_redis(folder)
        self._settings = settings = _with_traces(self._settings, folder)
        announce(folder, settings, url=base_url(settings.host, port), redis_url=redis_url)
        self._notices = Notices(redis_url, self._settings.namespace)
        common = {"redis_url": redis_url, "supervisor_pid": os.getpid(), **self._fabric(folder, ports)}
        common |= {"api_key": None}  # others have no use for it
        inner = {name: role for name, role in self._processes().items() if role != GATEWAY}
        metrics = dict(zip(inner, held_ports(_LOOPBACK, len(inner), ports), strict=True))
        upstreams = [f"{_SERVE}=http://{_LOOPBACK}:{await self._page.start()}/metrics"]
        upstreams += [f"{name}=http://{_LOOPBACK}:{metrics_port}/metrics" for name, metrics_port in metrics.items()]
        workers = [name for name, role in inner.items() if role in COMPUTING]
        shares = self._preview.shares(settings) if self._preview else []
        for name, role in self._processes().items():
            if role == GATEWAY:
                self._key = self._api_key(folder)
                changes = common | {"port": port, "metrics_upstreams": upstreams, "api_key": self._key}
            else:
                changes = common | {"host": _LOOPBACK, "metrics_port": metrics[name]}
            changes = changes | {"process": name}
            outlook = Outlook(spared=partial(self._spared, name, role), on_start=self._starts.labels(name).inc)
            if role in COMPUTING:
                index = workers.index(name)
                changes = changes | {"device": device_of(self._settings, index)} | (shares[index] if shares else {})
                outlook = replace(outlook, on_end=partial(self._notices.ended, name=name, metrics_port=metrics[name]))
            if name in self._ranks():
                changes = changes | {"rank": self._ranks().index(name)}
            await self._children.start_role(name, role, folder.write(name, self._settings, changes), outlook=outlook)

    def _api_key(self, folder: RunFolder) -> str | None:
        """Return the gateway's key: the one that was given, or a new one where other machines can connect and the
        private Redis, which has just begun, cannot have any. It is shown on a terminal, and else left in a file: logs
        are kept, and read by others."""
        settings = self._settings
        elsewhere = settings.api_keys_file is not None or settings.redis_url is not None
        if settings.api_key is not None or elsewhere or not keys_required(settings.auth, settings.host):
            return settings.api_key
        key = f"sk-{secrets.token_urlsafe(32)}"
        shown = key if sys.stderr.isatty() else f"in {folder.keep('api-key', key)}"
        log.warning(
            "no API key was given, so one was generated, which is valid until the server stops: %s "
            "(clients send 'Authorization: Bearer KEY'; set your own with EXPERTMESH_API_KEY, or use --auth off)",
            shown,
        )
        return key

    def _processes(self) -> dict[str, Role]:
        """Return name -> role of every process, in the order in which they are stopped."""
        names: dict[Role, list[str]] = {role: [role] for role in self._commands}
        names |= computing(self._settings)
        return {name: role for role in self._commands for name in names[role]}

    def _spared(self, name: str, role: Role) -> bool:
        """Return whether the server goes on without the process ``name``, which keeps failing."""
        settings = self._settings
        needed: dict[Role, int] = dict.fromkeys((EXPERTS, COLOCATED), settings.expert_groups or settings.seats)
        if not self._ranks():  # ranks in lock-step need one another
            needed[ATTENTION] = 1
        return role in needed and self._children.well_others(name, role) >= needed[role]

    def _ranks(self) -> list[str]:
        """Return the names of the attention workers that share the experts in lock-step."""
        return computing(self._settings)[ATTENTION] if self._settings.layout == "lockstep" else []

    def _fabric(self, folder: RunFolder, ports: ExitStack) -> dict[str, object]:
        """Return the settings by which several attention and expert workers reach one another."""
        settings = self._settings
        if settings.layout == "local":
            return {}
        file = settings.fabric_secret_file or folder.new_secret("fabric")
        secret: dict[str, object] = {"fabric_secret_file": str(file)}
        if settings.layout == "disaggregated":
            return secret | {"fabric_port": 0}
        if settings.layout == "colocated":
            return secret | {"expert_groups": settings.expert_groups or settings.seats, "fabric_port": 0}
        (port,) = held_ports(_LOOPBACK, 1, ports)
        return secret | {"lockstep_address": f"{_LOOPBACK}:{port}"}

    async def _start_redis(self, folder: RunFolder) -> str:
        redis = RedisProcess(folder.path / "redis")
        await self._children.start(_REDIS, redis, outlook=Outlook(on_start=self._starts.labels(_REDIS).inc))
        log.info("private Redis at %s", redis.url)
        return redis.url

    async def _announce(self, url: str) -> None:
        await self._ready(url)
        print(f"expertmesh serves {self._settings.model_name} at {url}/v1", flush=True)
        log.info("%s", self._pages(url))
        if self._on_ready:
            await self._on_ready(url, self._key)

    def _pages(self, url: str) -> str:
        """Return where the API is described and metrics are, and whether clients need a key."""
        settings = self._settings
        page = base_url(settings.host, settings.metrics_port) if settings.metrics_port else url
        asked = settings.api_key is not None or keys_required(settings.auth, settings.host)
        keys = "clients need an API key" if asked else "clients need no API key"
        return f"API description at {url}/docs, metrics at {page}/metrics; {keys}"

    async def _ready(self, url: str) -> None:
        """Return once the gateway is ready; log now and then what is missing."""
        clock = asyncio.get_running_loop().time
        noted = clock()
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                missing = "the gateway"
                try:
                    answer = await client.get(f"{url}/ready")
                    if answer.status_code == 200:
                        return
                    missing = _missing(answer.text)
                except httpx.HTTPError as error:
                    log.debug("not ready: %r", error)
                if clock() - noted > _READY_NOTE_S:
                    noted = clock()
                    log.info("waiting for: %s", missing)
                await asyncio.sleep(_READY_POLL_S)


def _missing(answer: str) -> str:
    """Return what is missing by the answer of the gateway's /ready: the end of its message, or its text."""
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.split())[:300]
    return message.rpartition("missing: ")[2].rstrip(".")
