"""An engine and its worker asleep: no memory, no request, and afterwards the same answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter
from redis.asyncio import Redis
from testkit.gpu.recorded_graph import record
from testkit.models.engines import ask, run, tokens
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import KEYS, Deployment, RunningWorker
from testkit.queue.client import check, finish
from testkit.queue.redis_server import RedisServer
from testkit.waiting import eventually

from services.attention.engine_thread import Add, EngineThread, Run
from services.attention.metrics import Growth
from services.attention.service import AttentionService, SleepOrdered
from services.attention.sleep import EngineSleep, WorkerSleep
from services.attention.step.engine import Engine, EngineOptions
from services.config import Settings
from services.errors import OutOfMemory
from services.fabric.local import LocalLink
from services.model.dense import DenseModel
from services.model.experts import ExpertShard
from services.model.sleep import RememberedWeights
from services.model.weight_source import FromCheckpoint
from services.model.weights import load_dense, load_experts
from services.queue.scheduler_side import SchedulerQueue
from services.queue.sleep import SleepFollower, WakeUpGivenUp

PROMPT = [5, 9, 33, 7, 21, 60, 44, 13]
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> tuple[Engine[Any], EngineSleep]:
    """With its experts in its process, and perhaps with recorded graphs."""
    source = RememberedWeights(FromCheckpoint())
    spec, how = tiny.reference.spec, {"dtype": torch.float32, "device": CPU, "source": source}
    model = DenseModel(spec, load_dense(tiny.folder, spec, **how))
    shard = ExpertShard(load_experts(tiny.folder, spec, **how), num_experts=spec.num_experts)
    made: Engine[Any] = Engine(
        model=model,
        link=LocalLink(shard.by_layer(), num_experts=spec.num_experts),
        options=EngineOptions(block_size=4, kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=16),
        clock=lambda: 0,
        capture=record if request.param else None,
    )
    made.prepare()
    return made, EngineSleep(made, source, CPU, made.prepare)


def answer(engine: Engine[Any]) -> list[int]:
    return tokens(run(engine, ask("a", PROMPT, 8))["a"])


def test_an_engine_answers_the_same_after_a_sleep_without_its_cache(
    engine: tuple[Engine[Any], EngineSleep], tiny: Any
) -> None:
    made, sleep = engine
    wanted = tiny.greedy(PROMPT, 8)
    assert answer(made) == wanted
    graphs = made.stats().graphs
    assert made.stats().kv_cached > 0
    for levels in ([1], [2], [1, 2], [2, 2]):
        for level in levels:
            sleep.free(level)
        assert made._runner.replayed_rows is None, "what runs steps holds no graphs"
        assert (made._kv._layers, made._kv.token_ids_S.nbytes, made.stats().graphs) == ([], 0, 0)
        if levels != [1]:
            made._model._weights.embed_VD.fill_(float("nan"))  # so small that it stays where it is
        sleep.restore()
        sleep.prepare()
        assert made.stats().kv_cached == 0, "cached prefixes are gone with the cache"
        assert made.stats().graphs == graphs
        assert answer(made) == wanted


def test_counters_go_on_where_an_engine_begins_again() -> None:
    counter, growth = Counter("c", "c", registry=CollectorRegistry()), Growth()
    assert [growth.follow(counter, total) for total in (5, 7, 0, 3)] == [5, 2, 0, 3]
    assert counter._value.get() == 10


def test_an_errand_waits_until_the_engine_has_nothing_to_do() -> None:
    engine, ran = SteppingEngine(step_s=0.0), threading.Event()
    errors: list[Exception | None] = []
    thread = EngineThread(engine, buffer_tokens=None, on_events=lambda: None, on_end=lambda _: None)
    thread.start()
    engine.gate.clear()
    thread.send(Add(ask("a", [1, 2], 3)))

    def work() -> None:
        assert not engine.has_work
        ran.set()
        raise ValueError("planted")

    thread.send(Run(work, errors.append))
    assert not ran.wait(0.1)
    engine.gate.set()
    assert ran.wait(20)
    thread.stop()
    assert [str(error) for error in errors] == ["planted"], "the thread lives on, and who sent it hears"


class Bed:
    """Notes what a worker's engine has to do."""

    def __init__(self, worker: RunningWorker) -> None:
        self.did: list[object] = []
        self._worker = worker

    def free(self, level: int) -> None:
        assert not self._worker.engine.has_work
        self.did.append(level)

    def restore(self) -> None:
        self.did.append("restore")

    def prepare(self) -> None:
        self.did.append("prepare")


async def _experts() -> None:
    pass


def asleep(worker: RunningWorker) -> tuple[WorkerSleep, Bed]:
    bed = Bed(worker)
    return worker.worker.sleeping(bed, _experts), bed


@pytest.mark.parametrize("drain_s", [30.0, 0.0])
async def test_no_request_is_lost_or_doubled_by_a_sleep(server: RedisServer, drain_s: float) -> None:
    """Those that run end first, or go on afterwards; those that wait and those that come stay in the queue."""
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01), drain_s=drain_s, credit_requests=8)
        sleep, bed = asleep(worker)
        client = await deployment.client()
        streams = await client.submit(*([n, n + 1] for n in range(16)), max_tokens=100)
        await eventually(lambda: any(stream.sent for stream in streams))
        await sleep.fall_asleep(1)
        assert (worker.worker.held(), worker.engine.held()) == ({}, {})
        ended = sum(stream.over for stream in streams)
        assert (ended > 0) == (drain_s > 0)
        assert ended < len(streams)
        streams += await client.submit([90, 91], max_tokens=5)
        await asyncio.sleep(0.3)
        [state] = await SchedulerQueue(deployment.connection(), KEYS, deployment.limits).workers()
        assert (state.credit_requests, state.outstanding_requests) == (0, 0), "nothing is assigned to a sleeping worker"
        await sleep.fall_asleep(2)
        await sleep.wake_up()
        await finish(streams)
        check(streams[:-1], 100)
        check(streams[-1:], 5)
        assert not any(stream.doubled for stream in streams)
        assert bed.did == [1, 2, "restore", "prepare"]


async def test_an_assignment_that_comes_late_belongs_to_the_queue(server: RedisServer) -> None:
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.005))
        sleep, _ = asleep(worker)
        held_back: list[Callable[[], None]] = []
        handle = worker.worker._handle
        worker.worker._handle = lambda message: held_back.append(lambda: handle(message))  # type: ignore[method-assign]
        client = await deployment.client()
        [stream] = await client.submit([1, 2], max_tokens=10)
        await eventually(lambda: held_back)
        await sleep.fall_asleep(1)
        for late in held_back:
            late()
        assert worker.worker.held() == {}, "its request is in the queue again"
        worker.worker._handle = handle  # type: ignore[method-assign]
        await sleep.wake_up()
        await finish([stream])
        check([stream], 10)
        assert not stream.doubled


async def test_a_wake_up_waits_for_experts_only_until_it_is_given_up(server: RedisServer) -> None:
    """Experts that sleep again wait for nobody, so waiting for them would never end."""
    away = asyncio.Event()
    async with Deployment(server.url) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine())
        bed = Bed(worker)
        sleep = worker.worker.sleeping(bed, away.wait)
        await sleep.fall_asleep(1)
        sleep.give_up()  # there is nothing to give up yet
        waking = asyncio.create_task(sleep.wake_up())
        await eventually(lambda: bed.did == [1, "restore"])
        await asyncio.sleep(0.05)
        sleep.give_up()
        with pytest.raises(WakeUpGivenUp):
            await waking
        await sleep.fall_asleep(1)
        away.set()
        await sleep.wake_up()
        assert bed.did == [1, "restore", 1, "restore", "prepare"]


def test_the_cache_is_taken_before_weights_are_read(engine: tuple[Engine[Any], EngineSleep]) -> None:
    """Too little memory for it shows at once, not after minutes of reading."""
    made, sleep = engine
    sleep.free(2)

    def full() -> None:
        raise torch.OutOfMemoryError("Others have it.")

    def read() -> None:
        raise AssertionError("weights were read in vain")

    made.wake_up = full  # type: ignore[method-assign]
    sleep._weights.fill_again = read  # type: ignore[method-assign,assignment]
    with pytest.raises(OutOfMemory):
        sleep.restore()


def test_a_worker_that_sleeps_misses_nothing_and_one_that_wakes_may() -> None:
    service = AttentionService(Settings(), Redis(), CollectorRegistry())
    service._follower = follower = SleepFollower(None, fall_asleep=_experts, wake_up=_experts)  # type: ignore[arg-type]
    assert service.missing() == ["weights"]
    follower.ordered = 1
    assert service.missing() == []


def test_a_worker_whose_experts_will_not_come_before_a_sleep_stops_waiting_for_them() -> None:
    settings = Settings(enable_sleep_mode=True)
    service = AttentionService(settings, Redis(), CollectorRegistry(), experts_loaded=lambda: False)
    assert service._start is not None
    service._start.ordered.set()
    with pytest.raises(SleepOrdered):
        service._wait_for_experts()
