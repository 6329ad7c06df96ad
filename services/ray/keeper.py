"""What an actor of the fleet does: it keeps one process of expertmesh alive on its node, and stops it in order.

The role runs in a child process, as under `expertmesh serve`: its memory, its event loop and its GPU are its own, and
SIGTERM drains it. The child dies with the actor. Ray starts an actor that died again, on another node if it has to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
from prometheus_client import disable_created_metrics

from services.config import EXPERTS, SCHEDULER, Role, Settings, settings_of
from services.errors import StartupError
from services.model.hub import with_checkpoint
from services.model.load_spec import load_spec
from services.runtime import configure_logging
from services.runtime.run_folder import RunFolder
from services.supervisor.child import Outlook, RedisProcess
from services.supervisor.children import COMMANDS, Children
from services.supervisor.handover import base_url, held_ports
from services.supervisor.notices import Notices
from services.supervisor.policy import RestartPolicy
from services.supervisor.readiness import Readiness

_STOP_MARGIN_S = 5.0

State = Literal["starting", "ready", "failed", "stopped"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a process fares.

    ``waits_for`` says what a process that is not ready lacks, or why it failed. ``starts`` counts how often this actor
    started it; ``pid`` and ``metrics_port`` are those of the last start, ``address`` and ``node`` those of the node.
    ``life`` is this actor's since Ray started it, and ``log`` what its log files in Ray's folder begin with.
    """

    state: State = "starting"
    waits_for: str = ""
    host: str = ""
    address: str = ""
    node: str = ""
    pid: int | None = None
    metrics_port: int = 0
    starts: int = 0
    life: str = ""
    log: str = ""


class Keeper:
    """Keeps one role alive, in a thread of its own. Ray calls the methods.

    Args:
        name: for logs and metrics.
        settings: those of :class:`services.config.Settings` in full, as JSON types.
        secret: the secret of the fabric, if the settings name no file with one.
    """

    def __init__(self, name: str, role: Role, settings: Mapping[str, Any], secret: str) -> None:
        self._name, self._role, self._secret = name, role, secret
        self._settings = settings_of(settings, "the controller's settings")
        self._address = node_address()
        context = ray.get_runtime_context()
        self._report = Report(
            host=socket.gethostname(),
            address=self._address,
            node=context.get_node_id(),
            life=uuid.uuid4().hex,
            log=f"worker-{context.get_worker_id()}",
        )
        self._readiness: Readiness | None = None
        self._children = Children(COMMANDS, new_policy=RestartPolicy, stop_margin_s=_STOP_MARGIN_S)
        self._ended = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        configure_logging(name, self._settings.log_level, self._settings.log_format)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as in every role
        threading.Thread(target=lambda: asyncio.run(self._main()), name="keeper", daemon=True).start()

    def report(self) -> Report:
        """Return how the process fares now."""
        report = self._report
        if report.state in ("failed", "stopped") or self._readiness is None:
            return report
        missing = self._readiness.lacks(self._name)
        pid = self._children.pid(self._name)
        return replace(report, pid=pid, state="starting" if missing else "ready", waits_for=missing)

    def secret(self) -> str:
        """Return the fabric's secret: a controller that starts again has lost it."""
        return self._secret

    def stop(self) -> Report:
        """Stop the process as SIGTERM does, wait until it has ended, and return the last report. One that has not
        begun, because its checkpoint is still being downloaded, is not waited for."""
        if self._loop is not None and self._stop is not None and not self._ended.is_set():
            with suppress(RuntimeError):  # it ends right now
                self._loop.call_soon_threadsafe(self._stop.set)
            if self._readiness is not None:
                self._ended.wait()
        return self._report

    async def _main(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            await self._keep(self._stop)
            self._report = replace(self._report, state="stopped" if self._stop.is_set() else "failed")
        except StartupError as error:
            log.error("%s", error.message)
            self._report = replace(self._report, state="failed", waits_for=error.message)
        except Exception as error:
            log.exception("crashed")
            self._report = replace(self._report, state="failed", waits_for=repr(error))
        finally:
            self._ended.set()

    async def _keep(self, stop: asyncio.Event) -> None:
        settings = self._settings
        if self._role != SCHEDULER:
            settings = await asyncio.to_thread(with_checkpoint, settings)
            assert settings.model is not None, "checked by the controller"
            await asyncio.to_thread(load_spec, settings.model)  # says what is wrong before anything starts
        assert settings.redis_url is not None, "the controller gives it"
        with RunFolder() as folder, ExitStack() as ports:
            (page,) = held_ports("0.0.0.0", 1, ports)
            self._readiness = readiness = Readiness({self._name: base_url("127.0.0.1", page)})
            notices, children = Notices(settings.redis_url, settings.namespace), self._children
            outlook = Outlook(
                spared=lambda: True,  # others may do its work, and the controller sees that it keeps failing
                proven=lambda: readiness.ever,
                lived_s=partial(readiness.served_s, self._name),
                on_start=partial(self._started, page, readiness),
                on_end=partial(notices.ended, name=self._name, metrics_port=page),
            )
            try:
                await children.start_role(self._name, self._role, self._written(folder, page), outlook=outlook)
                code = await children.watch(stop, readiness.follow())
                if code:
                    self._report = replace(self._report, waits_for=f"it ended with exit code {code}; its log says why")
            finally:
                readiness.end()
                await children.stop(settings)
                await notices.aclose()

    def _written(self, folder: RunFolder, page: int) -> Path:
        """Write the configuration of the process, and return the file."""
        settings = self._settings
        secret = settings.fabric_secret_file or (folder.keep("fabric.secret", self._secret) if self._secret else None)
        changes: dict[str, object] = {
            "host": "0.0.0.0",
            "advertise": self._address,
            "metrics_port": page,
            "process": self._name,
            "supervisor_pid": os.getpid(),
            "api_key": None,
            "fabric_secret_file": str(secret) if settings.uses_seats or self._role == EXPERTS else None,
        }
        return folder.write(self._name, settings, changes)

    def _started(self, page: int, readiness: Readiness) -> None:
        readiness.started(self._name)
        self._report = replace(self._report, metrics_port=page, starts=self._report.starts + 1)


def node_address() -> str:
    """Return the address at which other nodes of the Ray cluster reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class RedisKeeper:
    """Keeps a private Redis alive for an application whose processes are all on one machine. Ray calls the methods.

    ``folder`` stays the same over restarts of the actor, and with it the URL.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._redis = folder, RedisProcess(Path(folder))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop, self._stopping, self._ended = asyncio.Event(), threading.Event(), threading.Event()
        self._children = Children({}, new_policy=RestartPolicy, stop_margin_s=_STOP_MARGIN_S)
        self._up = threading.Event()
        self._failure: StartupError | None = None
        threading.Thread(target=lambda: asyncio.run(self._main()), name="keeper", daemon=True).start()

    def url(self) -> str:
        """Return the URL once Redis answers. Raises StartupError where it did not start."""
        self._up.wait()
        if self._failure is not None:
            raise self._failure
        return self._redis.url

    def stop(self) -> None:
        """End the server and remove its folder."""
        self._stopping.set()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._ended.wait(_STOP_MARGIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._children.start("redis", self._redis)
        except StartupError as error:
            self._failure = error
        self._up.set()
        if self._failure is None:
            await self._children.watch(self._stop, asyncio.sleep(0))
            await self._children.stop(Settings())
        self._ended.set()
        if not self._stopping.is_set() and self._failure is None:
            os._exit(1)  # it keeps ending: Ray starts the actor again
