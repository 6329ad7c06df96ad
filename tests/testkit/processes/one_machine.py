"""A deployment whose workers are those of machines (`expertmesh workers`), beside a scheduler and a gateway."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from testkit.pocket.answers import POCKET
from testkit.processes.servers import Bench, Server, flags, free_port, free_ports

MAX_WORKERS = 3
"""Of a machine: as many ports are its own."""


@dataclass(kw_only=True)
class Machine(Server):
    """``proc`` starts its workers, which are seen on ``port``; ``url`` is the gateway's."""

    port: int

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self.port}"


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
        port = free_ports(1 + MAX_WORKERS)
        given = self._computing | {"metrics_port": port, "drain_timeout": 5, **options}
        proc = self._stage.start("workers", [sys.executable, "-m", "services", "workers", *flags(**given)])
        found = Machine(url=self._url, proc=proc, port=port)
        found.wait_ready()
        return found
