"""A gateway over a scripted queue: no Redis, no worker, a real uvicorn on a free port, a tiny byte-level tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from testkit.http_peer import URL, Peer, bearer
from testkit.processes.background import ended
from testkit.queue.scripted import ScriptedQueue, ScriptedSwitch
from testkit.waiting import eventually
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.gateway.app import Parts, build_app
from services.gateway.auth import ApiKey, Authenticator, KeyStore, digest
from services.gateway.budget import Holdings
from services.gateway.chat_template import ChatTemplate
from services.gateway.connections import Bounds, Connections
from services.gateway.exposition import Siblings
from services.gateway.guard import Guard, Rooms
from services.gateway.harmony import marks_of
from services.gateway.health import Readiness
from services.gateway.intake import Intake
from services.gateway.offload import Offload
from services.gateway.prompts import PromptReader, ServedModel
from services.gateway.results import ResultFollower
from services.gateway.server import Drain, HttpServer, listen
from services.gateway.sleep import SleepOrders, Switch
from services.gateway.table import JobTable
from services.gateway.targets import LatencyTargets
from services.gateway.tokenize import TokenizerRoutes
from services.gateway.tokenizer import SpecialTokens, TextCodec
from services.messages import AttemptLost, GenerateRequest, TokenEvent, TokenLogprob
from services.metrics import GatewayMetrics
from services.runtime.tracing import Tracer

BOS, EOS = "<|bos|>", "<|eos|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE over a few sentences; every other character is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog. Hello world, hello there!"] * 4, trainer
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@pytest.fixture(scope="session")
def codec(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer, SpecialTokens(bos_token=BOS, eos_token=EOS))


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint's folder as far as the gateway's text side reads it."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "pad_token": None, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return tmp_path


class _Tenants:
    """A key for each of ``names``, which is the name itself. Whoever is "limited" has a rate."""

    def __init__(self, names: Sequence[str]) -> None:
        self._keys = {
            digest(name): ApiKey(
                name=name, sha256=digest(name), requests_per_minute=60.0 if name == "limited" else None
            )
            for name in names
        }

    async def find(self, sha256: str) -> ApiKey | None:
        return self._keys.get(sha256)

    def recall(self, sha256: str) -> ApiKey | None:
        del sha256
        return None

    async def usable(self) -> bool:
        return True


class _Leader:
    def __init__(self) -> None:
        self.led = True

    async def present(self) -> bool:
        return self.led


@dataclass
class Harness:
    """A running gateway and the handles on it."""

    queue: ScriptedQueue
    table: JobTable
    follower: ResultFollower
    intake: Intake
    server: HttpServer
    connections: Connections
    parts: Parts
    leader: _Leader
    registry: CollectorRegistry
    url: str
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    codec: TextCodec
    tasks: list[asyncio.Task[None]]
    peers: list[Peer] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def says(self, said: str | list[int], **options: Any) -> list[int]:
        """Answers each request with ``said``, and returns its tokens."""
        token_ids = self.ids(said) if isinstance(said, str) else said
        self.queue.answer = lambda request: events_for(request, token_ids, **options)
        return token_ids

    async def post(self, *, key: str | None = None, tenant: str | None = None, **body: Any) -> httpx.Response:
        """Asks for a completion, with ``key`` as its Idempotency-Key."""
        headers = ({} if key is None else {"Idempotency-Key": key}) | ({} if tenant is None else bearer(tenant))
        return await self.http.post(URL, json={"prompt": "hello", "max_tokens": 200, **body}, headers=headers)

    async def ask(self, **options: Any) -> tuple[asyncio.Task[httpx.Response], GenerateRequest]:
        """A request on its way, see :meth:`post`, and what the queue got for it."""
        before = len(self.queue.admitted)
        asking = asyncio.create_task(self.post(**options))
        return asking, (await self.queue.wait_for("admitted", before + 1))[before]

    async def connect(self, *sent: bytes, **options: Any) -> Peer:
        """A connection of its own, until the end of the test."""
        self.peers.append(peer := await Peer.of(self.url, **options))
        await peer.send(*sent)
        return peer

    def drain(self, *, delay_s: float = 0.0, timeout_s: float = 0.2) -> Drain:
        close_idle = self.server.close_idle
        return Drain(self.intake, self.table, self.follower, timeout_s, delay_s, close_idle=close_idle)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"expertmesh_{name}", labels) or 0.0

    def refused(self, reason: str) -> float:
        return self.value("gateway_refused_total", reason=reason)


def events_for(
    request: GenerateRequest,
    token_ids: Sequence[int],
    *,
    finish: Any = "length",
    start: int = 0,
    attempt: int | None = None,
) -> list[TokenEvent]:
    """A worker's events for ``token_ids``; with made-up log-probabilities where the request asks for them."""
    top = request.sampling.logprobs
    found = []
    for offset, token_id in enumerate(token_ids):
        index = start + offset
        alternatives = [(token_id, -0.5), *((other, -1.0 - other) for other in range(5, 5 + max(0, (top or 0) - 1)))]
        found.append(
            TokenEvent(
                request_id=request.id,
                attempt=attempt or request.attempt,
                index=index,
                token_id=token_id,
                finish=finish if offset == len(token_ids) - 1 else None,
                logprob=TokenLogprob(-0.5, alternatives[: top or 0]) if top is not None else None,
                prompt_logprobs=prompt_logprobs(request) if index == 0 else None,
                cached_tokens=3 if index == 0 else 0,
            )
        )
    return found


def prompt_logprobs(request: GenerateRequest) -> list[TokenLogprob | None] | None:
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    ids = request.token_ids[: request.prompt_len]
    return [None, *(TokenLogprob(-0.25, [(token_id, -0.25)][:top]) for token_id in ids[1:])]


def lost(request: GenerateRequest, attempt: int) -> AttemptLost:
    return AttemptLost(request_id=request.id, attempt=attempt, reason="lease_expired")


@pytest.fixture
def script() -> Any:
    """Helpers to write a worker's events: ``script.events(...)`` and ``script.lost(...)``."""

    class Script:
        events = staticmethod(events_for)
        lost = staticmethod(lost)

    return Script


Start = Callable[..., Any]


@pytest.fixture
async def start(codec: TextCodec) -> AsyncIterator[Start]:
    """Starts gateways: ``harness = await start(...)``. They are stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def begin(**options: Any) -> Harness:
            return await stack.enter_async_context(_running(options.pop("codec", codec), **options))

        yield begin


@pytest.fixture
async def gateway(start: Start) -> Harness:
    return await start()


@asynccontextmanager
async def _running(
    codec: TextCodec,
    *,
    template: str | None = TEMPLATE,
    store: KeyStore | None = None,
    tenants: Sequence[str] = (),
    queue: ScriptedQueue | None = None,
    max_body_bytes: int = 1 << 20,
    separate_metrics: bool = False,
    max_queued_requests: int = 1024,
    max_queued_tokens: int = 4_000_000,
    answer_bytes: int = 64 << 20,
    same_machine: bool = False,
    allowed_origins: Sequence[str] = (),
    bounds: Bounds | None = None,
    body_room: int = 64 << 20,
    request_timeout_s: float = 60.0,
    lease_s: float = 6.0,
    max_len: int = 256,
    redis_ms: Callable[[], float] | None = None,
    ttft_s: float = 2.0,
    tracer: Tracer | None = None,
    switch: Switch | None = None,
    family: str = "",
) -> AsyncIterator[Harness]:
    registry = CollectorRegistry()
    metrics, queue = GatewayMetrics(registry), queue or ScriptedQueue()
    offload, holdings = Offload(metrics), Holdings(answer_bytes)
    table = JobTable(metrics, LatencyTargets(metrics, ttft_s=ttft_s, tpot_s=0.1), holdings)
    follower = ResultFollower(
        queue,
        table,
        metrics,
        lease_s=lease_s,
        own_lease_s=60.0,
        request_timeout_s=request_timeout_s,
        redis_ms=redis_ms,
    )
    model = ServedModel(
        name="tiny",
        vocab_size=codec.tokenizer.get_vocab_size(),
        max_len=max_len,
        codec=codec,
        template=None if template is None else ChatTemplate(template, codec.special),
        created=1,
        marks=marks_of(family, codec),
    )
    prompts = PromptReader(model, lambda: follower.workers, offload)
    intake = Intake(
        prompts=prompts,
        queue=queue,
        table=table,
        follower=follower,
        metrics=metrics,
        incarnation="gw",
        request_timeout_s=request_timeout_s,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        keep_s=3600.0,
        offload=offload,
    )
    store = _Tenants(tenants) if tenants else store
    leader, siblings, authenticator = _Leader(), Siblings([]), Authenticator(store)
    bounds = bounds or Bounds(body_bytes=max_body_bytes)
    rooms = Rooms.of(
        metrics,
        connections=bounds.connections,
        shared=store is not None,
        max_body=max_body_bytes,
        body_bytes=body_room,
    )
    parts = Parts(
        intake=intake,
        follower=follower,
        authenticator=authenticator,
        guard=Guard(
            authenticator=authenticator, queue=queue, rooms=rooms, offload=offload, max_body_bytes=max_body_bytes
        ),
        tokenizer=TokenizerRoutes(prompts, offload),
        readiness=Readiness(follower, leader.present, store),
        sleep=SleepOrders(switch or ScriptedSwitch(), authenticator, enabled=switch is not None, wait_s=0.5),
        siblings=siblings,
        registry=registry,
        metrics=metrics,
        offload=offload,
        version="1.2.3",
        protected=store is not None,
        same_machine=same_machine,
        separate_metrics=separate_metrics,
        allowed_origins=allowed_origins,
        tracer=tracer,
    )
    app = build_app(parts)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    connections = Connections(bounds, metrics, "api")
    server = HttpServer(app, listener, connections)
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(server.run())]
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http, openai:
        harness = Harness(
            queue=queue,
            table=table,
            follower=follower,
            intake=intake,
            server=server,
            connections=connections,
            parts=parts,
            leader=leader,
            registry=registry,
            url=url,
            http=http,
            openai=openai,
            codec=codec,
            tasks=tasks,
        )
        await eventually(lambda: follower.up or queue.down)
        yield harness
        for peer in harness.peers:
            peer.writer.transport.abort()
    for job in table.jobs():
        follower.abandon(job)
    server.stop()
    try:
        await tasks[1]
    finally:
        await ended(tasks)
        offload.close()
        await siblings.close()
        listener.close()
