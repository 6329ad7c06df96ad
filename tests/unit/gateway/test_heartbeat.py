"""A gateway's heartbeat goes on while its event loop is busy, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from testkit.waiting import until

from services.errors import QueueUnavailable
from services.gateway.heartbeat import HeartbeatThread


class Beats:
    """A session that counts; ``failures`` of its first beats raise."""

    def __init__(self, failures: int) -> None:
        self.count = 0
        self.closed = False
        self._failures = failures

    async def session(self, keep: Any) -> None:
        try:
            await keep(self.beat)
        finally:
            self.closed = True

    async def beat(self) -> None:
        self.count += 1
        if self.count <= self._failures:
            raise QueueUnavailable("Redis is away.")


def wait_for(beats: Beats, count: int) -> None:
    """Holds the event loop up meanwhile."""
    until(lambda: beats.count >= count, f"{count} beats")


@pytest.mark.parametrize("failures", [0, 3])
async def test_it_beats_while_the_loop_is_held_up_or_redis_is_away_and_ends_when_stopped(failures):
    beats = Beats(failures)
    heartbeat = HeartbeatThread(beats.session, lease_s=0.04)
    heartbeat.start()
    wait_for(beats, failures + 5)
    await heartbeat.stop()
    assert beats.closed
    before = beats.count
    await asyncio.sleep(0.05)
    assert beats.count == before


async def test_a_loop_that_gives_no_sign_for_long_is_taken_for_dead():
    now = [0.0]
    beats = Beats(failures=0)
    heartbeat = HeartbeatThread(beats.session, lease_s=0.02, stuck_s=10, clock=lambda: now[0])
    heartbeat.start()
    wait_for(beats, 3)
    now[0] = 11.0
    await asyncio.sleep(0.05)
    before = beats.count
    await asyncio.sleep(0.1)
    assert beats.count == before
    heartbeat.tick()
    wait_for(beats, before + 1)
    await heartbeat.stop()


async def test_a_session_that_fails_is_logged_and_holds_up_nobody(caplog):
    async def session(_keep: Any) -> None:
        raise OSError("no way to Redis")

    heartbeat = HeartbeatThread(session, lease_s=0.02)
    heartbeat.start()
    await heartbeat.stop()
    assert "the heartbeat thread failed" in caplog.text
