"""The processes of a fleet: those that obey (testkit/fleet/experts.py, testkit/fleet/front.py), and real schedulers."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from testkit.processes.servers import free_port, metric_sum

from perf.fleet.experts import FleetShape, obey
from perf.fleet.front import stand
from services.runtime import die_with_parent


def members(shape: FleetShape, name: str, pipe: Any) -> None:
    logging.disable(logging.WARNING)
    uvloop.run(obey(shape, name, pipe))


def front(shape: FleetShape, pipe: Any) -> None:
    uvloop.run(stand(shape, pipe))


class Remote:
    """A process that obeys."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
        self._process.start()

    def __call__(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> Any:
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Scheduler:
    """``python -m services.scheduler``; its metrics page."""

    def __init__(self, url: str, options: list[str], log: Path) -> None:
        self._port = free_port()
        where = ["--redis-url", url, "--metrics-port", str(self._port)]
        command = [sys.executable, "-m", "services.scheduler", *where, *options]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with_parent())
        self.stats = psutil.Process(self._process.pid)

    def page(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self._port}/metrics", timeout=30).text

    def value(self, name: str) -> float:
        return metric_sum(self.page(), f"expertmesh_{name}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
