"""Faults of a bad night, the alerts that they are known for, and what the runbooks of these say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from testkit.pocket.answers import POCKET
from testkit.processes.servers import stopped
from testkit.waiting import until

from chaos.hot_tokens import hot_tokens
from chaos.night import SHAPE, SPARE, Night

SLOW = "experts-3"
"""The worker that gets a slow GPU."""
SLOW_ROW_S, HEAVY_ROW_S = 0.004, 0.0001
"""What a row takes on a slow GPU, and with experts as heavy as they are beside attention in large models."""
MORE_BLOCKS, MORE_REPLICAS = 2048, 4
DRAINED_S = 90.0
Fault = Callable[[Night], "contextlib.AbstractAsyncContextManager[None]"]
Cure = Callable[[Night], None]
"""What the runbook of an alert says, done while the fault's load goes on."""


@contextlib.asynccontextmanager
async def shard_killed(night: Night) -> AsyncIterator[None]:
    """The only worker of a shard group is killed and does not come back."""
    night.cluster.kill9("experts-1")
    try:
        yield
    finally:
        night.cluster.start_one("experts-1")
        await asyncio.to_thread(night.cluster.wait_whole)


@contextlib.asynccontextmanager
async def leader_stopped(night: Night) -> AsyncIterator[None]:
    """Both schedulers stand still: their processes are there and do nothing."""
    with contextlib.ExitStack() as stack:
        for name in night.cluster.of("scheduler"):
            stack.enter_context(stopped(night.cluster.members[name].running.pid))
        yield
    await asyncio.to_thread(night.cluster.wait_whole)


@contextlib.asynccontextmanager
async def tenant_floods(night: Night) -> AsyncIterator[None]:
    """One tenant sends far more than the workers can take; the other one goes on as before."""
    async with night.flood.sending(streams=400, prompt_tokens=(64, 256), output_tokens=(64, 200)):
        yield


@contextlib.asynccontextmanager
async def cache_filled(night: Night) -> AsyncIterator[None]:
    """Long answers fill the KV cache, so that sequences wait for blocks or lose theirs."""
    async with night.flood.sending(streams=48, prompt_tokens=(300, 500), output_tokens=(300, 480)):
        yield


@contextlib.asynccontextmanager
async def expert_hot(night: Night) -> AsyncIterator[None]:
    """Prompts whose rows go to few experts, which take as long for a row as heavy ones do."""
    everyone = night.cluster.of("experts")
    hot = await asyncio.to_thread(hot_tokens, POCKET / "model", SHAPE.groups)
    night.say(f"  tokens {hot.tokens} send {hot.shares} of their rows to group {hot.group}")
    night.hot_group = hot.group
    night.rows.take(HEAVY_ROW_S, *everyone)
    try:
        async with night.flood.sending(streams=12, prompt_tokens=(200, 400), output_tokens=(1, 1), tokens=hot.tokens):
            yield
    finally:
        night.rows.take(0.0, *everyone)


@contextlib.asynccontextmanager
async def shard_slow(night: Night) -> AsyncIterator[None]:
    """A shard group needs more time for its rows than the others, and has the most replicas that it may have."""
    night.rows.take(SLOW_ROW_S, SLOW)
    try:
        async with night.flood.sending(streams=24, prompt_tokens=(16, 64), output_tokens=(32, 64)):
            yield
    finally:
        night.rows.take(0.0, SLOW)


def start_again(night: Night, name: str, **options: object) -> None:
    """As a rollout does: the process ends by SIGTERM, and one with other options takes its place."""
    member = night.cluster.members[name]
    night.cluster.terminate(name)
    until(lambda: not member.alive, f"{name} has ended", limit_s=DRAINED_S, every_s=0.2)
    member.options.update(options)
    night.cluster.start_one(name)
    night.cluster.wait_whole()


def more_blocks(night: Night) -> None:
    """Attention workers start again with more KV blocks, one after the other."""
    for name in night.cluster.of("attention"):
        start_again(night, name, kv_blocks=MORE_BLOCKS)


def more_replicas(night: Night) -> None:
    """The hot group may have more replicas, and gets a second one."""
    for name in night.cluster.of("scheduler"):
        start_again(night, name, max_replicas=MORE_REPLICAS)
    night.cluster.members[SPARE].options["expert_group"] = night.hot_group
    night.cluster.start_one(SPARE)
    night.cluster.wait_whole()


def other_worker(night: Night) -> None:
    """The slow worker's pod is deleted; its successor is elsewhere, and not slow."""
    night.rows.take(0.0, SLOW)
    start_again(night, SLOW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """``awaited``: alerts that must fire within ``limit_s``; without any, the fault is watched for so long."""

    name: str
    fault: Fault
    awaited: tuple[str, ...]
    limit_s: float
    cure: Cure | None = None
    """Without one the end of the fault cures it: what was away comes back."""


_FULL, _HOT = "ExpertmeshKvCacheFull", "ExpertmeshHotShard"
DRILLS = (
    Drill(name="shard-killed", fault=shard_killed, awaited=("ExpertmeshShardWithoutSeat",), limit_s=240),
    Drill(name="leader-stopped", fault=leader_stopped, awaited=("ExpertmeshMetricsAway",), limit_s=240),
    Drill(name="tenant-floods", fault=tenant_floods, awaited=("ExpertmeshQueueOld",), limit_s=420),
    Drill(name="kv-cache-filled", fault=cache_filled, awaited=(_FULL,), limit_s=300, cure=more_blocks),
    Drill(name="expert-hot", fault=expert_hot, awaited=(_HOT,), limit_s=300, cure=more_replicas),
    Drill(name="shard-slow", fault=shard_slow, awaited=(_HOT,), limit_s=300, cure=other_worker),
)
