"""Attention workers in lock-step, which share the experts: the recorded answers, also when one of them is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit.pocket.answers import answers_while, assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Bench, Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone


def serve(stage: Bench, ranks: int, **options: Any) -> Server:
    return serve_pocket(stage, layout="lockstep", workers=ranks, **options)


def ranks_of(server: Server) -> list[psutil.Process]:
    return server.of_role("attention")


def used_s(server: Server) -> dict[int, float]:
    """CPU time of each rank, by process id."""
    times = {rank.pid: rank.cpu_times() for rank in ranks_of(server)}
    return {pid: time.user + time.system for pid, time in times.items()}


def check_answers(server: Server, count: int, at_once: int = 32) -> None:
    wanted = recorded()[:count]
    assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=at_once)))


def check_answers_and_rest(server: Server) -> None:
    """Answers are the recorded ones, and nobody computes without work."""
    check_answers(server, 64)
    until(lambda: server.metric("expertmesh_lockstep_messages_total", scope="node") > 0, "messages are counted")
    check_answers(server, 1)  # one has rows, all take part
    time.sleep(2)  # counters are brought up to date every second
    turns, before = server.metric("expertmesh_lockstep_turns_total"), used_s(server)
    time.sleep(2)
    assert server.metric("expertmesh_lockstep_turns_total") == turns, "nobody steps without work"
    assert max(cpu_s - before[pid] for pid, cpu_s in used_s(server).items()) < 0.5, "nobody spins without work"


def all_start_again(server: Server, disturb: Callable[[], object]) -> None:
    """After ``disturb``, which ends one of them."""
    before = {rank.pid for rank in ranks_of(server)}

    def others() -> bool:
        now = {rank.pid for rank in ranks_of(server)}
        return len(now) == len(before) and not now & before

    disturb()
    until(others, "all ranks started again")
    check_answers(server, 4)


def check_end(server: Server) -> None:
    assert server.proc.stop() == 0
    for flaw in ("terminate called", "was asked to stop, but", "did not end within"):
        assert flaw not in server.proc.log(), "ranks end in order"


def test_ranks_give_the_recorded_answers_and_killed_ones_lose_no_request(tmp_path: Path) -> None:
    """One amid requests; then, while nobody asks, the one at which all ranks meet; the others start again each time."""
    with bench(tmp_path) as stage:
        server = serve(stage, 3)
        check_answers_and_rest(server)
        victim = ranks_of(server)[1]
        all_start_again(server, lambda: asyncio.run(answers_while(server, victim.kill, count=100)))
        meeting = next(rank for rank in ranks_of(server) if rank.cmdline()[-1].endswith("attention-0.yaml"))
        all_start_again(server, meeting.kill)
        check_end(server)


def test_ranks_leave_together_without_giving_a_request_up(tmp_path: Path) -> None:
    """One is to end, amid requests and then while nobody asks; the others drain with it, and all meet again."""
    with bench(tmp_path) as stage:
        server = serve(stage, 3)
        check_answers(server, 1)
        leaver = ranks_of(server)[2]
        all_start_again(server, lambda: asyncio.run(answers_while(server, leaver.terminate, count=64, at_once=32)))
        all_start_again(server, ranks_of(server)[1].terminate)
        said = server.proc.log()
        assert (said.count("ended with exit code 0;"), said.count("ended with exit code 75;")) == (2, 4)
        assert server.metric("expertmesh_lost_attempts_total") == 0, "no attempt was given up"
        check_end(server)


def test_sliced_experts_and_relays_give_the_recorded_answers(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve(stage, 4, expert_slices=2, expert_slots=10, lockstep_exchange="hierarchical")
        check_answers_and_rest(server)
        check_end(server)
