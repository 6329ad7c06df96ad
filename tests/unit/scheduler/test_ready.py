"""What /ready says of a scheduler."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from testkit.processes.background import ended
from testkit.processes.roles import KEYS
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

from services.metrics import SchedulerMetrics
from services.queue.limits import QueueLimits
from services.queue.scheduler_side import SchedulerQueue
from services.scheduler.loop import Scheduler
from services.scheduler.observer import Observer
from services.scheduler.policy import DispatchPolicy


def _scheduler(redis: Redis, token: str) -> Scheduler:
    queue = SchedulerQueue(redis, KEYS, QueueLimits())
    observer = Observer(SchedulerMetrics(CollectorRegistry()), queue)
    return Scheduler(queue, DispatchPolicy(), observer, token=token, lease_s=1.0)


async def test_it_is_ready_while_redis_answers_leading_or_not(server: RedisServer, redis: Redis) -> None:
    schedulers = [_scheduler(redis, token) for token in ("one", "two")]
    assert [each.missing() for each in schedulers] == [["Redis"], ["Redis"]]
    tasks = [asyncio.ensure_future(each.run(asyncio.Event())) for each in schedulers]
    await eventually(lambda: not any(each.missing() for each in schedulers))
    server.kill()
    await eventually(lambda: all(each.missing() == ["Redis"] for each in schedulers))
    await ended(tasks)
