"""Attention workers that each hold a seat, too: recorded answers, also when one of them is killed or leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit.pocket.answers import assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Bench, Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone


def serve(stage: Bench, workers: int, **options: Any) -> Server:
    return serve_pocket(stage, layout="colocated", workers=workers, **options)


def check_end(server: Server) -> None:
    assert server.proc.stop() == 0
    assert "Traceback" not in server.proc.log()


def joined(server: Server) -> float:
    return server.metric("expertmesh_experts_joined_steps_total")


def pids(server: Server) -> set[int]:
    return {worker.pid for worker in server.of_role("colocated")}


async def disturbed(server: Server, wanted: list[dict[str, Any]], victim: psutil.Process, how: str) -> None:
    """Answers to ``wanted`` are the recorded ones though ``victim`` goes once some of them are computed."""
    asking = asyncio.create_task(complete_all(server.url, wanted, at_once=32))
    while server.metric("expertmesh_requests_running") < 3 and not asking.done():
        await asyncio.sleep(0.05)
    getattr(victim, how)()
    assert not asking.done(), "it came too late to disturb"
    assert_recorded(wanted, await asking)


@pytest.mark.parametrize(("shared", "teams"), [("off", "off"), ("host", "auto")])
def test_recorded_answers_by_several_colocated_workers(tmp_path: Path, shared: str, teams: str) -> None:
    with bench(tmp_path) as stage:
        server = serve(stage, 2, fabric_shared=shared, joint_steps=teams)
        wanted = recorded()[:32]

        def joined_steps() -> bool:
            """Asks again each time: two workers have to meet for a step to be computed as one."""
            assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=16)))
            return joined(server) > 0 or teams == "off"

        until(joined_steps, "some steps ran as one", limit_s=240)
        rows = [server.metric("expertmesh_experts_rows_total", shard=shard) for shard in "01"]
        assert min(rows) > 0, "each holds a share of the experts"
        until(lambda: server.metric("expertmesh_shared_steps_total") > 0 or shared == "off", "memory is shared")
        assert joined(server) == 0 or teams == "auto"
        check_end(server)


@pytest.mark.parametrize("options", [{}, {"fabric_shared": "host", "joint_steps": "auto"}])
def test_where_another_seat_holds_the_same_nobody_waits_for_the_dead_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Three workers, one group: two may go at any time. One is killed, one is asked to leave, both come again."""
    with bench(tmp_path) as stage:
        server = serve(stage, 3, expert_groups=1, **options)
        wanted = recorded()[:64]
        for how in ("kill", "terminate"):
            before = server.of_role("colocated")
            asyncio.run(disturbed(server, wanted, before[1], how))
            until(lambda: len(pids(server) - {one.pid for one in before}) == 1, "it comes again")  # noqa: B023
        check_end(server)


def test_where_no_other_seat_holds_them_steps_wait_for_the_newcomer(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve(stage, 2)
        before = server.of_role("colocated")
        asyncio.run(disturbed(server, recorded()[:48], before[1], "kill"))
        assert len(pids(server) - {one.pid for one in before}) == 1, "the other one went on"
        check_end(server)
