"""Attention and experts in processes of their own: the recorded answers, while expert workers are killed and leave."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from testkit.pocket.answers import POCKET, answers_while, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

from services.model.digests import write_digests

pytestmark = pytest.mark.alone


def listed(server: Server) -> float:
    """Seats in the routing table."""
    return server.metric("expertmesh_expert_seats")


@pytest.mark.parametrize(("shared", "groups"), [("off", 2), ("host", 1)])
def test_no_token_changes_while_expert_workers_die_and_leave(tmp_path: Path, shared: str, groups: int) -> None:
    """Two replicas of each group."""
    workers, folder = 2 * groups, shutil.copytree(POCKET / "model", tmp_path / "model")
    write_digests(folder)
    with bench(tmp_path) as stage:
        options = {"expert_workers": workers, "expert_groups": groups, "fabric_shared": shared}
        server = serve_pocket(stage, folder, layout="disaggregated", **options)
        until(lambda: listed(server) == workers, "all expert workers are in the table")
        victim, leaver = server.of_role("experts")[:2]
        asyncio.run(answers_while(server, victim.kill))
        until(lambda: len(server.of_role("experts")) == workers, "another one was started")
        until(lambda: listed(server) == workers, "another one took the seat's place")
        assert ("sharing memory with" in server.proc.log()) == (shared == "host")
        asyncio.run(answers_while(server, lambda: leaver.send_signal(signal.SIGTERM)))
        until(lambda: not leaver.is_running() or leaver.status() == psutil.STATUS_ZOMBIE, "it left")
