"""`expertmesh workers`: starts, watches and stops the workers of one machine, a process and a GPU each.

In a container that sees all GPUs of its node they share memory, which workers in containers of their own cannot. To the
rest of the deployment each is a worker like any other: it registers, dies and is restarted by itself. Out to the
workers: a configuration file each, and SIGTERM. Back: exit codes, and their metrics pages, which are served as one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, disable_created_metrics

from services.config import WORKERS, Role, Settings
from services.errors import StartupError
from services.gateway.exposition import Siblings, parse_upstreams
from services.metrics import MachineMetrics
from services.model.hub import with_checkpoint
from services.runtime import MetricsServer, configure_logging, run_process, show_build
from services.runtime.run_folder import RunFolder
from services.supervisor.child import Outlook
from services.supervisor.children import COMMANDS, Children
from services.supervisor.handover import base_url, held, held_ports
from services.supervisor.notices import Notices
from services.supervisor.policy import RestartPolicy
from services.supervisor.preflight import Preview, preflight
from services.supervisor.readiness import STUCK_S, Readiness
from services.supervisor.roster import COMPUTING, Place, computing, places

PAGES_S = 5.0
"""How long a scrape waits for the workers' pages: workers that load kernels or weights answer late."""

log = logging.getLogger(__name__)


def run_workers(settings: Settings) -> int:
    """Run the workers until Ctrl-C or SIGTERM; return the exit code."""
    configure_logging(WORKERS, settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as in every role
    try:
        workers = Workers(with_checkpoint(settings))
    except StartupError as error:
        log.error("%s", error.message)
        return error.exit_code
    return run_process(workers.run, force=workers.kill)


class Workers:
    """Supervisor of one machine's workers. ``commands`` and ``check`` tie it to the real roles."""

    def __init__(
        self,
        settings: Settings,
        *,
        commands: Mapping[Role, Sequence[str]] = COMMANDS,
        check: Callable[[Settings], Preview | None] = preflight,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
        stop_margin_s: float = 5.0,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._settings = settings
        self._preflight = check
        self._stuck_s = stuck_s
        self._registry = CollectorRegistry()
        show_build(self._registry, WORKERS)
        self._starts = MachineMetrics(self._registry).starts
        self._children = Children(commands, new_policy=new_policy, stop_margin_s=stop_margin_s)

    async def run(self, stop: asyncio.Event) -> int:
        """Start all, wait for ``stop`` or for a worker that cannot be kept alive, stop all.

        Raises:
            StartupError: the model folder is unusable, or a port is taken.
        """
        settings = self._settings
        assert settings.model is not None, "load_settings requires it of workers"
        assert settings.redis_url is not None, "load_settings requires it of workers"
        preview = self._preflight(settings)
        with RunFolder() as folder, ExitStack() as ports:
            shares = preview.shares(settings) if preview else ()
            found = places(settings, self._pages(ports), shares)
            seats = [place.fabric_port for place in found if place.fabric_port]
            held(settings.host, seats, ports, option="--fabric-port")
            pages = {place.name: base_url(settings.host, place.metrics_port) for place in found}
            readiness = Readiness(pages, on_stuck=self._stuck, stuck_s=self._stuck_s)
            notices = Notices(settings.redis_url, settings.namespace)
            async with aclosing(notices), self._page(readiness):
                code = await self._run(found, folder, readiness, notices, stop)
        return self._children.exit_code(code)

    def kill(self) -> None:
        """End all at once; :meth:`run` then returns soon."""
        self._children.kill()

    async def _run(
        self,
        found: Sequence[Place],
        folder: RunFolder,
        readiness: Readiness,
        notices: Notices,
        stop: asyncio.Event,
    ) -> int:
        try:
            for place in found:
                await self._start(place, folder, readiness, notices)
            code = await self._children.watch(stop, readiness.follow())
            if stop.is_set():
                log.info("stopping when open requests have ended; a second signal stops at once")
            return code
        finally:
            readiness.end()
            await self._children.stop(self._settings)

    def _pages(self, until: ExitStack) -> Sequence[int]:
        """Return the ports of the workers' own pages: those after ``--metrics-port``, or any where that is 0."""
        settings, count = self._settings, sum(map(len, computing(self._settings).values()))
        if not settings.metrics_port:
            return held_ports(settings.host, count, until)
        first = settings.metrics_port + 1
        return held(settings.host, range(first, first + count), until, option="--metrics-port")

    async def _start(self, place: Place, folder: RunFolder, readiness: Readiness, notices: Notices) -> None:
        changes = place.changes() | {"supervisor_pid": os.getpid(), "process": place.name, "api_key": None}
        outlook = Outlook(
            spared=partial(self._spared, place.name),
            proven=lambda: readiness.ever,
            lived_s=partial(readiness.served_s, place.name),
            on_start=partial(self._started, place.name, readiness),
            on_end=partial(notices.ended, name=place.name, metrics_port=place.metrics_port),
        )
        log.info("%s", place)
        config = folder.write(place.name, self._settings, changes)
        await self._children.start_role(place.name, place.role, config, outlook=outlook)

    def _started(self, name: str, readiness: Readiness) -> None:
        readiness.started(name)
        self._starts.labels(worker=name).inc()

    def _stuck(self, name: str) -> None:
        log.error("%s has not answered for %.0f s; killing it", name, self._stuck_s)
        self._children.restart(name)

    def _spared(self, name: str) -> bool:
        """Return whether a worker that keeps failing is restarted on and on: while others on this machine are well."""
        return self._children.well_others(name, *COMPUTING) > 0

    @asynccontextmanager
    async def _page(self, readiness: Readiness) -> AsyncIterator[None]:
        upstreams = parse_upstreams([f"{name}={url}" for name, url in readiness.urls.items()])
        siblings = Siblings(upstreams, role=WORKERS, timeout_s=PAGES_S)
        page = MetricsServer(
            self._registry,
            host=self._settings.host,
            port=self._settings.metrics_port,
            missing=readiness.missing,
            joined=siblings.page,
        )
        try:
            log.info("metrics of all %d workers on port %d", len(readiness.urls), await page.start())
            yield
        finally:
            await page.close()
            await siblings.close()
