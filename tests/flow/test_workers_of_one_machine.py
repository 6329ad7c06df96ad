"""`expertmesh workers`, beside a scheduler and a gateway: recorded answers, also while one of them is killed, and while
a second machine's come and go."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.pocket_answers import POCKET, answers_while, assert_recorded, complete_all, recorded
from testkit.servers import Bench, Server, bench, flags, free_port, free_ports, metric_sum, wait_until

WORKERS = 2
"""Of both kinds, on each machine."""
MOST_WORKERS = 3

pytestmark = pytest.mark.alone


@dataclass(kw_only=True)
class Machine(Server):
    """``proc`` starts its workers, ``page`` is where they are seen; ``url`` is the gateway's."""

    page: str

    def metric(self, name: str, **labels: str) -> float:
        return metric_sum(httpx.get(f"{self.page}/metrics", timeout=10).text, name, **labels)

    def wait_ready(self) -> None:
        wait_until(lambda: self._ready() == 200, 60, "all its workers are ready", every_s=0.1)

    def _ready(self) -> int:
        assert self.proc.popen.poll() is None, self.proc.log()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.page}/ready", timeout=2).status_code
        return 0


class Deployment:
    """Redis, a scheduler, a gateway; machines as they are asked for."""

    def __init__(self, stage: Bench, *, lease_s: float = 2.0) -> None:
        port, http = free_port(), free_port()
        secret = stage.folder / "secret"
        secret.write_bytes(b"0123456789abcdef0123456789abcdef")
        stage.redis(port=port)
        common = {"redis_url": f"redis://127.0.0.1:{port}/0", "lease": lease_s}
        serving = common | {"model": POCKET / "model", "served_model_name": "pocket"}
        self._computing: dict[str, Any] = serving | {"dtype": "float32", "threads": 1, "fabric_secret_file": secret}
        self._stage = stage
        stage.role("scheduler", **common, expert_groups=WORKERS)
        stage.role("gateway", **serving, port=http)
        self._url = f"http://127.0.0.1:{http}"

    def machine(self, **options: object) -> Machine:
        """Ready, with its workers."""
        page = free_ports(1 + MOST_WORKERS)
        given = self._computing | {"metrics_port": page, "drain_timeout": 5, **options}
        proc = self._stage.start("workers", [sys.executable, "-m", "services", "workers", *flags(**given)])
        found = Machine(url=self._url, proc=proc, page=f"http://127.0.0.1:{page}")
        found.wait_ready()
        return found


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with bench(tmp_path) as stage:
        yield Deployment(stage)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Deployment]:
    """Leases last for longer than a test: nobody waits for one to expire."""
    with bench(tmp_path) as stage:
        yield Deployment(stage, lease_s=120.0)


def test_one_that_is_killed_comes_again_in_place_and_nothing_is_lost(patient: Deployment) -> None:
    machine = patient.machine(colocated_workers=WORKERS, expert_groups=WORKERS, fabric_shared="host")
    victim, began = machine.of_role("colocated")[1], time.monotonic()
    asyncio.run(answers_while(machine, victim.kill))
    machine.wait_ready()
    assert time.monotonic() - began < 100, "its requests did not wait until its lease expired"
    assert machine.metric("expertmesh_worker_starts_total", worker="colocated-1") == 2
    assert machine.metric("expertmesh_worker_starts_total", worker="colocated-0") == 1
    assert machine.metric("expertmesh_shared_steps_total") > 0
    rows = [machine.metric("expertmesh_experts_rows_total", shard=shard) for shard in "01"]
    assert min(rows) > 0, "it holds the same group again"
    assert machine.proc.stop() == 0
    assert "Traceback" not in machine.proc.log()


def test_machines_come_and_go_under_load(deployment: Deployment) -> None:
    """Each holds all groups: the second one is told to end, then the first one dies with all that it started."""
    options = {"colocated_workers": WORKERS, "expert_groups": WORKERS}
    first, second = deployment.machine(**options), deployment.machine(**options)
    asyncio.run(answers_while(first, lambda: second.proc.popen.send_signal(signal.SIGTERM)))
    assert second.proc.stop() == 0
    third = deployment.machine(**options)
    asyncio.run(answers_while(third, first.proc.kill9))
    assert third.metric("expertmesh_worker_starts_total") == WORKERS, "the other machine's end did it no harm"


def test_attention_and_experts_in_workers_of_their_own(deployment: Deployment) -> None:
    machine = deployment.machine(attention_workers=1, expert_workers=2, expert_groups=WORKERS, fabric_shared="host")
    wanted = recorded()[:32]
    assert_recorded(wanted, asyncio.run(complete_all(machine.url, wanted, at_once=16)))
    assert min(machine.metric("expertmesh_experts_rows_total", shard=shard) for shard in "01") > 0
    assert machine.proc.stop() == 0
