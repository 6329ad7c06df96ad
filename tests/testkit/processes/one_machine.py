"""A deployment whose workers are those of machines (`expertmesh workers`), beside a scheduler and a gateway."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import httpx

from testkit.pocket.answers import POCKET
from testkit.processes.servers import Bench, Server, flags, free_port, free_ports, metric_sum
from testkit.waiting import until

MAX_WORKERS = 3
"""Of a machine: as many ports are its own."""


@dataclass(kw_only=True)
class Machine(Server):
    """``proc`` starts its workers, ``page`` is where they are seen; ``url`` is the gateway's."""

    page: str

    def metric(self, name: str, **labels: str) -> float:
        return metric_sum(httpx.get(f"{self.page}/metrics", timeout=10).text, name, **labels)

    def wait_ready(self) -> None:
        until(lambda: self._ready() == 200, "all its workers are ready", every_s=0.1)

    def _ready(self) -> int:
        assert self.proc.popen.poll() is None, self.proc.log()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.page}/ready", timeout=2).status_code
        return 0


class Deployment:
    """Redis, a scheduler, a gateway; machines as they are asked for."""

    def __init__(self, stage: Bench, *, groups: int, lease_s: float = 2.0) -> None:
        port, http = free_port(), free_port()
        secret = stage.folder / "secret"
        secret.write_bytes(b"0123456789abcdef0123456789abcdef")
        stage.redis(port=port)
        common = {"redis_url": f"redis://127.0.0.1:{port}/0", "lease": lease_s}
        serving = common | {"model": POCKET / "model", "served_model_name": "pocket"}
        self._computing: dict[str, Any] = serving | {"dtype": "float32", "threads": 1, "fabric_secret_file": secret}
        self._stage = stage
        stage.role("scheduler", **common, expert_groups=groups)
        stage.role("gateway", **serving, port=http)
        self._url = f"http://127.0.0.1:{http}"

    def machine(self, **options: object) -> Machine:
        """Ready, with its workers."""
        page = free_ports(1 + MAX_WORKERS)
        given = self._computing | {"metrics_port": page, "drain_timeout": 5, **options}
        proc = self._stage.start("workers", [sys.executable, "-m", "services", "workers", *flags(**given)])
        found = Machine(url=self._url, proc=proc, page=f"http://127.0.0.1:{page}")
        found.wait_ready()
        return found
