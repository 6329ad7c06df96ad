"""Attention workers that each hold a seat, too: recorded answers, also when one of them is killed or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit.pocket.answers import answers_while, assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone

SHARED = {"fabric_shared": "host", "joint_steps": "auto"}


@contextmanager
def serving(folder: Path, workers: int, **options: Any) -> Iterator[Server]:
    """One that ends in order."""
    with bench(folder) as stage:
        server = serve_pocket(stage, layout="colocated", workers=workers, **options)
        yield server
        assert server.proc.stop() == 0
        assert "Traceback" not in server.proc.log()


def newcomers(server: Server, before: list[psutil.Process]) -> int:
    return len({worker.pid for worker in server.of_role("colocated")} - {worker.pid for worker in before})


@pytest.mark.parametrize("options", [{"fabric_shared": "off", "joint_steps": "off"}, SHARED], ids=["tcp", "shared"])
def test_recorded_answers_by_several_colocated_workers(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also when one of them is killed: no other seat holds its experts, so steps wait for the one that comes."""
    with serving(tmp_path, 2, **options) as server:
        shared, wanted = options == SHARED, recorded()[:32]

        def joined_steps() -> bool:
            """Asks again each time: two workers have to meet for a step to be computed as one."""
            assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=16)))
            return server.metric("expertmesh_experts_joined_steps_total") > 0 or not shared

        until(joined_steps, "some steps ran as one", limit_s=240)
        rows = [server.metric("expertmesh_experts_rows_total", shard=shard) for shard in "01"]
        assert min(rows) > 0, "each holds a share of the experts"
        until(lambda: server.metric("expertmesh_shared_steps_total") > 0 or not shared, "memory is shared")
        assert (server.metric("expertmesh_experts_joined_steps_total") > 0) == shared
        before = server.of_role("colocated")
        asyncio.run(answers_while(server, before[1].kill, count=48, at_once=32))
        assert newcomers(server, before) == 1, "the other one went on"


@pytest.mark.parametrize("options", [{}, SHARED], ids=["tcp", "shared"])
def test_where_another_seat_holds_the_same_nobody_waits_for_the_dead_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Three workers, one group: two may go at any time. One is killed, one is asked to leave, both come again."""
    with serving(tmp_path, 3, expert_groups=1, **options) as server:
        for how in ("kill", "terminate"):
            before = server.of_role("colocated")
            asyncio.run(answers_while(server, getattr(before[1], how), count=64, at_once=32))
            until(lambda: newcomers(server, before) == 1, "it comes again")  # noqa: B023
