"""The gateway role: HTTP requests come in, requests to the queue go out. It needs Redis, and the checkpoint's
configuration and tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from redis.asyncio import Redis

from services.config import GATEWAY, Settings
from services.errors import ConfigError, QueueUnavailable
from services.gateway.acceptor import within_descriptors
from services.gateway.app import Parts, build_app, build_metrics_app
from services.gateway.auth import Authenticator, KeyStore, WithKey, is_loopback, keys_required
from services.gateway.budget import Holdings
from services.gateway.chat_template import load_chat_template
from services.gateway.connections import Bounds, Connections
from services.gateway.exposition import Siblings, parse_upstreams
from services.gateway.guard import Guard, Rooms
from services.gateway.harmony import marks_of
from services.gateway.health import Readiness
from services.gateway.heartbeat import Beat, HeartbeatThread
from services.gateway.intake import Intake
from services.gateway.key_stores import FileKeys, RedisKeys
from services.gateway.memory import collect_seldom, give_back_memory, keep_one_heap
from services.gateway.offload import Offload
from services.gateway.ports import Queue
from services.gateway.prompts import PromptReader, ServedModel
from services.gateway.results import ResultFollower
from services.gateway.server import Drain, HttpServer, listen
from services.gateway.sleep import SleepOrders
from services.gateway.table import JobTable
from services.gateway.targets import LatencyTargets
from services.gateway.tokenize import TokenizerRoutes
from services.gateway.tokenizer import load_codec, read_tokenizer_config
from services.metrics import GatewayMetrics, VllmNames, of_gateway
from services.model.hub import with_checkpoint
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.queue.clock import RedisClock
from services.queue.connect import check_server, command, connect
from services.queue.gateway_side import GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.loads import LoadNotes
from services.queue.quarantine import Quarantine
from services.queue.sleep import SleepSwitch
from services.runtime import incarnation, run_role, show_build
from services.runtime.tasks import end_tasks
from services.runtime.tracing import Tracer, tracing

log = logging.getLogger(__name__)

_OF_METRICS = Bounds(connections=16, spare=0, body_bytes=0)
_CLOCK_EVERY_S = 5.0
_SWITCH_S = 0.001
"""How long a thread keeps the interpreter's lock while the event loop waits for it. Python's default is five times as
long, and the loop waits each time that it has polled for events."""


def served_model(settings: Settings, spec: ModelSpec) -> ServedModel:
    """Returns the model of the checkpoint. Raises CheckpointError where its tokenizer or template is unusable."""
    assert settings.model is not None, "load_settings requires it of this role"
    config = read_tokenizer_config(settings.model)
    codec = load_codec(settings.model, config)
    beyond = sum(token_id >= spec.vocab_size for token_id in codec.tokenizer.get_vocab().values())
    if beyond:
        text = "%s/tokenizer.json has %d tokens beyond the model's vocabulary of %d; prompts with them are refused"
        log.warning(text, settings.model, beyond, spec.vocab_size)
    return ServedModel(
        name=settings.model_name,
        vocab_size=spec.vocab_size,
        max_len=min(settings.max_model_len or spec.max_position, spec.max_position),
        codec=codec,
        template=load_chat_template(settings.model, config, codec.special),
        created=int(time.time()),
        marks=marks_of(spec.family, codec),
    )


def key_store(settings: Settings, redis: Redis, metrics: GatewayMetrics) -> KeyStore | None:
    """Returns the store of API keys; None where clients need none."""
    metrics.keys_usable.set(1)
    if settings.api_key is not None:
        return WithKey(settings.api_key, _shared_keys(settings, redis, metrics))
    return _shared_keys(settings, redis, metrics) if keys_required(settings.auth, settings.host) else None


def _shared_keys(settings: Settings, redis: Redis, metrics: GatewayMetrics) -> KeyStore:
    """Returns the keys of the file, or of Redis."""
    if settings.api_keys_file is not None:
        return FileKeys(settings.api_keys_file, log.error, report=metrics.keys_usable.set)
    log.info("reading API keys from Redis; use --api-keys-file for a file, or --auth off for no keys")
    return RedisKeys(redis, Keys(settings.namespace).api_keys)


def check_sleep(settings: Settings, store: KeyStore | None) -> None:
    """Refuse to let anybody who reaches this server send its model to sleep. Raises ConfigError."""
    if settings.enable_sleep_mode and store is None and not is_loopback(settings.host):
        raise ConfigError(
            f"With --enable-sleep-mode and without API keys, anybody who reaches {settings.host} could stop the model.",
            hint="Leave --auth out and create a key: expertmesh keys create NAME --admin.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """The parts of a gateway process that live as long as the process."""

    queue: Queue
    table: JobTable
    follower: ResultFollower
    parts: Parts
    notes: LoadNotes
    heartbeat: HeartbeatThread
    bounds: Bounds
    clock: RedisClock


async def _beating(settings: Settings, name: str, keep: Callable[[Beat], Coroutine[Any, Any, None]]) -> None:
    """Runs a session of :class:`HeartbeatThread`: heartbeats of gateway ``name``, over a connection of their own."""
    assert settings.redis_url is not None, "load_settings requires it of this role"
    redis = connect(settings.redis_url, max_connections=1)
    try:
        queue = GatewayQueue(redis, Keys(settings.namespace), name, QueueLimits.of(settings))
        await keep(partial(queue.heartbeat, settings.gateway_lease))
    finally:
        await redis.aclose()


@asynccontextmanager
async def assemble(settings: Settings, redis: Redis, tracer: Tracer | None = None) -> AsyncIterator[Gateway]:
    """Builds a gateway that uses ``redis``; nothing runs yet."""
    assert settings.model is not None, "load_settings requires it of this role"
    spec = load_spec(settings.model)
    model = served_model(settings, spec)
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    show_build(registry, GATEWAY, settings.process)
    metrics, keys = GatewayMetrics(registry), Keys(settings.namespace)
    if settings.metrics_vllm_names:
        registry.register(VllmNames(of_gateway(metrics), lambda: model.name))
    name = incarnation()
    quarantine = Quarantine.of(redis, settings, GATEWAY, metrics.unreadable)
    limits = QueueLimits.of(settings)
    queue = GatewayQueue(redis, keys, name, limits, quarantine=quarantine)
    clock = RedisClock(redis)
    heartbeat = HeartbeatThread(partial(_beating, settings, name), lease_s=settings.gateway_lease)
    latencies = LatencyTargets(metrics, ttft_s=settings.target_ttft, tpot_s=settings.target_tpot)
    offload = Offload(metrics)
    holdings = Holdings(settings.answer_memory << 20)
    metrics.answer_bytes.set_function(lambda: holdings.total)
    table = JobTable(metrics, latencies, holdings)
    follower = ResultFollower(
        queue,
        table,
        metrics,
        lease_s=settings.lease,
        own_lease_s=settings.gateway_lease,
        request_timeout_s=settings.request_timeout,
        fingerprint=spec.fingerprint,
        redis_ms=clock.now_ms,
        on_beat=heartbeat.tick,
    )
    prompts = PromptReader(model, lambda: follower.workers, offload)
    intake = Intake(
        prompts=prompts,
        queue=queue,
        table=table,
        follower=follower,
        metrics=metrics,
        incarnation=name,
        request_timeout_s=settings.request_timeout,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        keep_s=limits.idempotency_s,
        offload=offload,
    )
    store = key_store(settings, redis, metrics)
    check_sleep(settings, store)
    authenticator = Authenticator(store)
    bounds = within_descriptors(Bounds(connections=settings.max_connections, body_bytes=settings.max_body_bytes))
    rooms = Rooms.of(
        metrics, connections=bounds.connections, shared=store is not None, max_body=settings.max_body_bytes
    )
    siblings = Siblings(parse_upstreams(settings.metrics_upstreams))
    parts = Parts(
        intake=intake,
        follower=follower,
        authenticator=authenticator,
        guard=Guard(
            authenticator=authenticator,
            queue=queue,
            rooms=rooms,
            offload=offload,
            max_body_bytes=settings.max_body_bytes,
        ),
        tokenizer=TokenizerRoutes(prompts, offload),
        readiness=Readiness(follower, partial(command, redis, "EXISTS", keys.leader), store),
        sleep=SleepOrders(
            SleepSwitch(redis, keys, limits),
            authenticator,
            enabled=settings.enable_sleep_mode,
            leaving=lambda: intake.leaving,
        ),
        siblings=siblings,
        registry=registry,
        metrics=metrics,
        offload=offload,
        version=version("expertmesh"),
        protected=store is not None,
        same_machine=store is None and is_loopback(settings.host),
        separate_metrics=bool(settings.metrics_port),
        allowed_origins=tuple(settings.allowed_origins),
        tracer=tracer,
    )
    try:
        notes = LoadNotes(redis, keys, member_id=name, lease_s=settings.lease, read=latencies.load)
        yield Gateway(
            queue=queue,
            table=table,
            follower=follower,
            parts=parts,
            notes=notes,
            heartbeat=heartbeat,
            bounds=bounds,
            clock=clock,
        )
    finally:
        offload.close()
        await siblings.close()


async def front(settings: Settings, stop: asyncio.Event) -> None:
    """Runs a gateway until ``stop``, then drains it."""
    with tracing(settings, GATEWAY) as tracer:
        listener = listen(settings.host, settings.port)
        try:
            async with in_service(settings, tracer) as gateway:
                await _serve(settings, gateway, listener, stop)
        finally:
            listener.close()


@asynccontextmanager
async def in_service(settings: Settings, tracer: Tracer | None = None) -> AsyncIterator[Gateway]:
    """Builds a gateway and runs all of it but its HTTP server: heartbeats, what follows Redis, and the page of metrics
    if that has a port of its own. After the block the gateway leaves the queue."""
    assert settings.redis_url is not None, "load_settings requires it of this role"
    sys.setswitchinterval(_SWITCH_S)
    keep_one_heap()
    redis = connect(settings.redis_url)
    try:
        async with assemble(settings, redis, tracer) as gateway, _separate_metrics(settings, gateway.parts):
            await _greet(gateway, redis)
            collect_seldom()
            gateway.heartbeat.start()
            try:
                async with _following(gateway):
                    yield gateway
            finally:
                await gateway.heartbeat.stop()
            with contextlib.suppress(QueueUnavailable):
                await gateway.queue.leave()
    finally:
        await redis.aclose()


@asynccontextmanager
async def _separate_metrics(settings: Settings, parts: Parts) -> AsyncIterator[None]:
    """Serves /metrics on a port of its own, if it has one."""
    if not settings.metrics_port:
        yield
        return
    listener = listen(settings.host, settings.metrics_port)
    server = HttpServer(build_metrics_app(parts), listener, Connections(_OF_METRICS, parts.metrics, "metrics"))
    serving = asyncio.create_task(server.run())
    try:
        yield
    finally:
        server.stop()
        await serving
        listener.close()


async def _greet(gateway: Gateway, redis: Redis) -> None:
    try:
        await check_server(redis)
        await gateway.follower.greet()
    except QueueUnavailable as error:
        log.warning("starting without a queue: %s", error.message)


@asynccontextmanager
async def _following(gateway: Gateway) -> AsyncIterator[None]:
    """Runs what follows Redis. An error there ends the block."""
    async with asyncio.TaskGroup() as group:
        work = (gateway.follower.run(), gateway.notes.run(), give_back_memory(), _keep_time(gateway.clock))
        background = [group.create_task(part) for part in work]
        try:
            yield
        finally:
            await end_tasks(background)


async def _serve(settings: Settings, gateway: Gateway, listener: socket.socket, stop: asyncio.Event) -> None:
    connections = Connections(gateway.bounds, gateway.parts.metrics, "api")
    server = HttpServer(build_app(gateway.parts), listener, connections)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.run())
        log.info("listening on %s port %d", settings.host, settings.port)
        await stop.wait()
        await _drain(settings, gateway, server)
        server.stop()
        await serving


async def _drain(settings: Settings, gateway: Gateway, server: HttpServer) -> None:
    """Has open requests end, and refuses others."""
    await Drain(
        gateway.parts.intake,
        gateway.table,
        gateway.follower,
        settings.drain_timeout,
        settings.drain_delay,
        close_idle=server.close_idle,
    ).run()


async def _keep_time(clock: RedisClock) -> None:
    """Follows Redis's clock, by which the age of tokens is measured."""
    while True:
        with contextlib.suppress(QueueUnavailable):
            await clock.sync()
        await asyncio.sleep(_CLOCK_EVERY_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the role and returns its exit code."""
    return run_role(GATEWAY, front, argv, prepare=partial(with_checkpoint, weights=False))
