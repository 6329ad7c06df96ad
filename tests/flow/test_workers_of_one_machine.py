"""`expertmesh workers`, beside a scheduler and a gateway: recorded answers, also while one of them is killed, and while
a second machine's come and go."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.pocket.answers import answers_while, assert_recorded, complete_all, recorded
from testkit.processes.one_machine import Deployment
from testkit.processes.servers import bench

WORKERS = 2
"""Attention and expert workers on each machine."""

pytestmark = pytest.mark.alone


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with bench(tmp_path) as stage:
        yield Deployment(stage, groups=WORKERS)


@pytest.fixture
def long_leases(tmp_path: Path) -> Iterator[Deployment]:
    """Leases last for longer than a test: nobody waits for one to expire."""
    with bench(tmp_path) as stage:
        yield Deployment(stage, groups=WORKERS, lease_s=120.0)


def test_one_that_is_killed_comes_again_in_place_and_nothing_is_lost(long_leases: Deployment) -> None:
    machine = long_leases.machine(layout="colocated", workers=WORKERS, expert_groups=WORKERS, fabric_shared="host")
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
    """Each holds all groups: the second one is asked to end, then the first one dies with all that it started."""
    options = {"layout": "colocated", "workers": WORKERS, "expert_groups": WORKERS}
    first, second = deployment.machine(**options), deployment.machine(**options)
    asyncio.run(answers_while(first, lambda: second.proc.popen.send_signal(signal.SIGTERM)))
    assert second.proc.stop() == 0
    third = deployment.machine(**options)
    asyncio.run(answers_while(third, first.proc.kill9))
    assert third.metric("expertmesh_worker_starts_total") == WORKERS, "the other machine's end did it no harm"


def test_attention_and_experts_in_workers_of_their_own(deployment: Deployment) -> None:
    machine = deployment.machine(
        workers=1, layout="disaggregated", expert_workers=2, expert_groups=WORKERS, fabric_shared="host"
    )
    wanted = recorded()[:32]
    assert_recorded(wanted, asyncio.run(complete_all(machine.url, wanted, at_once=16)))
    assert min(machine.metric("expertmesh_experts_rows_total", shard=shard) for shard in "01") > 0
    assert machine.proc.stop() == 0
