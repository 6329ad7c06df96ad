"""`expertmesh workers`: the workers of one machine, a process and a GPU each, started, watched and stopped together.

In a container that sees all GPUs of its node they share memory, which workers in containers of their own do not. Each
is a worker like any other to the rest of the deployment: it registers, dies and comes again alone. What crosses to
them: a configuration file each, and SIGTERM. What comes back: exit codes, and their pages, which are shown as one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics

from services.config import ATTENTION, COLOCATED, EXPERTS, WORKERS, Role, Settings
from services.gateway.exposition import Siblings, parse_upstreams
from services.metrics import MachineMetrics
from services.model.spec import load_spec
from services.runtime import FORCED, MetricsServer, configure_logging, run_process
from services.supervisor.children import MODULES, Children
from services.supervisor.handover import RunFolder, base_url, held_ports
from services.supervisor.policy import RestartPolicy
from services.supervisor.readiness import Readiness
from services.supervisor.roster import computing

log = logging.getLogger(__name__)


def run_workers(settings: Settings) -> int:
    """Runs them until Ctrl-C or SIGTERM; returns the exit code."""
    configure_logging(WORKERS, settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as in every role
    workers = Workers(settings)
    return run_process(workers.run, force=workers.kill)


class Workers:
    """Those of one machine. ``modules`` and ``check_model`` tie them to the real roles; ``stop_margin_s`` is as
    :class:`Children` says."""

    def __init__(
        self,
        settings: Settings,
        *,
        modules: Mapping[Role, str] = MODULES,
        check_model: Callable[[Path], object] = load_spec,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
        stop_margin_s: float = 5.0,
    ) -> None:
        self._settings = settings
        self._check_model = check_model
        self._registry = CollectorRegistry()
        starts = MachineMetrics(self._registry).starts
        self._children = Children(
            modules,
            new_policy=new_policy,
            stop_margin_s=stop_margin_s,
            on_start=lambda name: starts.labels(worker=name).inc(),
        )
        self._forced = False

    async def run(self, stop: asyncio.Event) -> int:
        """Starts all, waits for ``stop`` or for a worker that cannot be kept alive, stops all.

        Raises:
            StartupError: the model folder is unusable, or a port is taken.
        """
        assert self._settings.model is not None, "load_settings requires it of workers"
        self._check_model(self._settings.model)
        names = {name: role for role, names in computing(self._settings).items() for name in names}
        folder, ports = RunFolder(), ExitStack()
        try:
            pages = dict(zip(names, self._metrics_ports(len(names), ports), strict=True))
            readiness = Readiness({name: base_url(self._settings.host, port) for name, port in pages.items()})
            async with self._page(readiness):
                try:
                    await self._start(names, pages, folder)
                    code = await self._children.watch(stop, readiness.follow())
                finally:
                    await self._children.stop(self._settings)
        finally:
            ports.close()
            folder.remove()
        return FORCED if self._forced else code

    def kill(self) -> None:
        """Ends all at once; :meth:`run` then returns soon."""
        self._forced = True
        self._children.kill()

    def _metrics_ports(self, count: int, until: ExitStack) -> Sequence[int]:
        """Those after the port of the common page, where that was asked for."""
        first = self._settings.metrics_port
        return range(first + 1, first + 1 + count) if first else held_ports(self._settings.host, count, until)

    async def _start(self, names: Mapping[str, Role], pages: Mapping[str, int], folder: RunFolder) -> None:
        settings = self._settings
        common: dict[str, object] = {"supervisor_pid": os.getpid()}
        if settings.expert_workers:
            common |= {"experts": "tcp"}
        seats = [name for name, role in names.items() if role != ATTENTION]
        for index, (name, role) in enumerate(names.items()):
            own = {"metrics_port": pages[name], "gpu": settings.gpu + index}
            if name in seats:
                own |= self._of_seat(seats.index(name))
            config = folder.write(name, settings, common | own)
            await self._children.start_role(name, role, config, spared=partial(self._spared, name))

    def _of_seat(self, number: int) -> dict[str, int]:
        settings, own = self._settings, {}
        if settings.fabric_port:
            own["fabric_port"] = settings.fabric_port + number
        if settings.expert_groups:
            own["expert_group"] = number % settings.expert_groups
        return own

    def _spared(self, name: str) -> bool:
        """Whether a worker that keeps failing is tried on and on: for the others' sake, and theirs who use them."""
        return self._children.well_beside(name, ATTENTION, COLOCATED, EXPERTS) > 0

    @asynccontextmanager
    async def _page(self, readiness: Readiness) -> AsyncIterator[None]:
        siblings = Siblings(parse_upstreams([f"{name}={url}" for name, url in readiness.urls.items()]), role=WORKERS)
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
