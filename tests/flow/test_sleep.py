"""The whole server sleeps and wakes up: the recorded answers before and after, and less memory in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from testkit.pocket.answers import assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone

LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {"layout": "local", "workers": 2},
    "disaggregated": {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 2},
    "colocated": {"layout": "colocated", "workers": 2},
}
ROLES = ("attention", "experts", "colocated")
KV_BYTES = 1 << 30
"""Of an attention worker, by default."""
WEIGHT_BYTES = 30 << 20
"""Less than what the pocket model takes in float32."""


def order(server: Server, path: str) -> bool:
    """Whether the model sleeps, after all workers did what ``path`` asks for."""
    answer = httpx.post(server.url + path, timeout=120)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["is_sleeping"])


def is_sleeping(server: Server) -> bool:
    return bool(httpx.get(server.url + "/is_sleeping").json()["is_sleeping"])


def workers_of(server: Server) -> list[psutil.Process]:
    return [process for role in ROLES for process in server.of_role(role)]


def used(server: Server) -> tuple[int, int]:
    """Bytes that are mapped and resident, of all workers together."""
    memory = [process.memory_info() for process in workers_of(server)]
    return sum(each.vms for each in memory), sum(each.rss for each in memory)


def check_answers(server: Server, wanted: Sequence[dict[str, Any]]) -> None:
    assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted)))


async def asked_meanwhile(server: Server, wanted: Sequence[dict[str, Any]]) -> None:
    """Requests that come while the model sleeps wait for the wake-up."""
    asking = asyncio.create_task(complete_all(server.url, wanted))
    waiting = server.metric
    await asyncio.to_thread(until, lambda: waiting("expertmesh_queue_requests") == len(wanted), "they are in the queue")
    assert server.metric("expertmesh_sleep_level") > 0
    assert not asking.done()
    assert not await asyncio.to_thread(order, server, "/wake_up")
    assert_recorded(wanted, await asking)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_the_same_after_a_sleep_which_frees_memory(tmp_path: Path, layout: str) -> None:
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, enable_sleep_mode=True, **LAYOUTS[layout])
        wanted = recorded()[:24]
        check_answers(server, wanted)
        attention = len(server.of_role("attention")) + len(server.of_role("colocated"))
        mapped, resident = used(server)
        for _ in range(2):
            assert order(server, "/sleep?level=1")
        light = used(server)
        assert mapped - light[0] > attention * KV_BYTES * 0.9, "the KV caches are gone"
        assert order(server, "/sleep?level=2")
        assert resident - used(server)[1] > WEIGHT_BYTES, "the weights are gone"
        assert is_sleeping(server)
        victim = workers_of(server)[-1]
        victim.kill()
        count = len(workers_of(server))
        asyncio.run(asked_meanwhile(server, wanted))
        assert not is_sleeping(server)
        assert not order(server, "/wake_up")
        check_answers(server, wanted)
        until(lambda: len(workers_of(server)) >= count, "the killed one is back")
        assert server.proc.stop() == 0


def test_running_requests_end_first_or_go_on_after_the_sleep(tmp_path: Path) -> None:
    """With a drain of no time they are handed back amid their answers."""
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, enable_sleep_mode=True, drain_timeout=0, workers=2)
        wanted = recorded()[:200]

        async def amid() -> None:
            asking = asyncio.create_task(complete_all(server.url, wanted))
            begun = server.metric
            await asyncio.to_thread(until, lambda: begun("expertmesh_decode_tokens_total") > 0, "answers have begun")
            assert await asyncio.to_thread(order, server, "/sleep")
            assert not asking.done(), "the sleep came too late to disturb"
            assert not await asyncio.to_thread(order, server, "/wake_up")
            assert_recorded(wanted, await asking)

        asyncio.run(amid())
        assert server.metric("expertmesh_dead_letters") == 0
        assert "handing over" in server.proc.log()
