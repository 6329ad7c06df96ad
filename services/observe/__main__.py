"""``expertmesh observe``: Prometheus, the dashboards and, if it is installed, Grafana for this machine's servers."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from services.config import OptionParser
from services.dashboards.draw.html import Html, element
from services.dashboards.prometheus import Prometheus
from services.dashboards.shipped import FOLDER, shipped
from services.errors import PortInUse
from services.observe import grafana, prometheus
from services.observe.program import Program
from services.observe.targets import Target, Targets, named
from services.observe.web import Pages, Server
from services.runtime import configure_logging, run_process
from services.runtime.run_folder import RunFolder
from services.runtime.tasks import first_done
from services.supervisor.handover import check_port

PORT, PROMETHEUS_PORT, GRAFANA_PORT = 9091, 9090, 3000
_LOOPBACK = "127.0.0.1"
_LOOK_S = 2.0
log = logging.getLogger(__name__)


class Observer:
    """Runs the programs and serves the pages. ``given`` are targets that the user names; ``data``: where Prometheus
    keeps what it scraped (None: in a folder that ends with this process), ``max_data`` at most. A port of None is any
    that is free."""

    def __init__(
        self,
        given: Sequence[Target],
        *,
        data: Path | None,
        port: int | None,
        prometheus_port: int | None,
        max_data: str = prometheus.MAX_DATA,
    ) -> None:
        self._given = given
        self._data, self._max_data = data, max_data
        self._port = port
        self._prometheus_port = prometheus_port
        self._programs: list[Program] = []

    async def run(self, stop: asyncio.Event) -> int:
        """Run until ``stop``.

        Raises:
            ProgramMissing: there is no Prometheus.
            StartupError: a program does not start, or ends; a port is in use.
        """
        binary, dashboards = prometheus.find(), shipped()
        with RunFolder() as folder:
            targets = Targets(folder.path / "targets.json", self._given)
            _say(targets.refresh() or None)
            try:
                url = await self._start_prometheus(binary, folder)
                links = [("Prometheus", url), *await self._start_grafana(folder.path / "grafana", url)]
                source = Prometheus(url)
                pages = Pages(source=source, dashboards=dashboards, notes=_notes(links))
                await self._serve(pages, links, targets, stop)
                await source.aclose()
            finally:
                await asyncio.gather(*map(Program.stop, self._programs))
        return 0

    async def _serve(
        self,
        pages: Pages,
        links: Sequence[tuple[str, str]],
        targets: Targets,
        stop: asyncio.Event,
    ) -> None:
        port = _free(self._port, PORT, "--port")
        with socket.create_server((_LOOPBACK, port)) as listener:
            server = Server(pages.app(), listener)
            _announce(f"http://{_LOOPBACK}:{port}", links)
            ends = [program.ended() for program in self._programs]
            await first_done(stop.wait(), _follow(targets), server.run_here(), *ends)

    def kill(self) -> None:
        """End the programs at once."""
        for program in self._programs:
            program.kill()

    async def _start_prometheus(self, binary: str, folder: RunFolder) -> str:
        config = prometheus.config(folder.path / "targets.json", [prometheus.RULES])
        file = folder.keep("prometheus.yml", config)
        port = _free(self._prometheus_port, PROMETHEUS_PORT, "--prometheus-port")
        data = self._data or folder.path / "data"
        log_file = folder.path / "prometheus.log"
        started = prometheus.program(binary, file, data.absolute(), log_file, port, most=self._max_data)
        self._programs.append(started)
        await started.start()
        return f"http://{_LOOPBACK}:{port}"

    async def _start_grafana(self, folder: Path, prometheus_url: str) -> list[tuple[str, str]]:
        words = grafana.find()
        if words is None:
            return []
        grafana.provision(folder / "provisioning", prometheus_url, FOLDER)
        port = _free(None, GRAFANA_PORT, "--port")
        started = grafana.program(words, folder, port)
        self._programs.append(started)
        await started.start()
        return [("Grafana", f"http://{_LOOPBACK}:{port}/dashboards")]


async def _follow(targets: Targets) -> None:
    """Keep the file of targets true."""
    while True:
        await asyncio.sleep(_LOOK_S)
        _say(await asyncio.to_thread(targets.refresh))


def _say(new: Sequence[Target] | None) -> None:
    """Log the targets that are new; None: there is none at all."""
    if new is None:
        log.info("no server of yours runs on this machine yet; one that starts is found")
    for target in new or ():
        log.info("scraping %s", target.address)


def _free(wanted: int | None, usual: int, option: str) -> int:
    """Return the port that is wanted, or without one the usual port, or a free one where that is taken."""
    if wanted is not None:
        return check_port(_LOOPBACK, wanted, option=option)
    try:
        return check_port(_LOOPBACK, usual)
    except PortInUse:
        return check_port(_LOOPBACK, 0)


def _adding() -> str:
    return (
        "For a Grafana of your own, add that Prometheus as a data source with the scrape interval 2s, and import the "
        f"files of {FOLDER}."
    )


def _notes(links: Sequence[tuple[str, str]]) -> tuple[Html, ...]:
    shown = [element("p", f"{name}: ", element("a", url, href=url)) for name, url in links]
    return (*shown, element("p", _adding()))


def _announce(url: str, links: Sequence[tuple[str, str]]) -> None:
    lines = [f"{name:<12}{link}" for name, link in [("dashboards", url), *links]]
    print("\n".join([*lines, "", _adding(), "Ctrl-C ends all of it."]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code.

    Raises:
        ConfigError: an option is wrong.
    """
    given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    configure_logging("observe", "info", "text")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    observer = Observer(
        [named(text, given.release) for text in given.target],
        data=given.data,
        max_data=prometheus.size(given.max_data),
        port=given.port,
        prometheus_port=given.prometheus_port,
    )
    return run_process(observer.run, force=observer.kill)


def _parser() -> OptionParser:
    parser = OptionParser(
        "expertmesh observe",
        "Run Prometheus with the rules, and the dashboards, for the servers of this machine: those that run, and those "
        "that are started later.",
    )
    parser.add_argument(
        "--target",
        action="extend",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="pages of metrics to scrape as well, such as those of servers elsewhere",
    )
    parser.add_argument(
        "--release",
        metavar="NAME",
        help="name of the deployment of which the targets are roles (default: each is one)",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"of the dashboards (default: {PORT}, or one that is free)"
    )
    parser.add_argument(
        "--prometheus-port", type=int, metavar="N", help=f"default: {PROMETHEUS_PORT}, or one that is free"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="where Prometheus keeps what it scraped (default: a private folder that ends with this process)",
    )
    parser.add_argument(
        "--max-data",
        default=prometheus.MAX_DATA,
        metavar="SIZE",
        help="what that may take of the disk; then the oldest goes (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
