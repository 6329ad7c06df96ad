"""The wire: every message that crosses a process boundary, and its codec. Torch-free.

Events, inbox messages and the reports of seats are msgpack arrays: their field order is part of the wire, new fields
go last. Requests and workers are maps. In all of them a new field has a default.
Ids and lengths are counted in tokens, times in milliseconds by Redis TIME.

Every message has a version (:data:`services.wire.WIRE`). Members of a deployment announce which versions they read, and
a message is written in the newest that all of its readers know, so that processes of two releases serve together.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec.msgpack import Decoder

from services.errors import ErrorInfo
from services.wire import OLDEST_WIRE, read

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch their filters off.

    ``seed`` and ``choice`` key the Gumbel noise together with the position and the token, so a draw depends
    on nothing else. ``logprobs`` asks for that many alternatives per generated token (0: the drawn token's
    log-probability alone); ``prompt_logprobs`` for the same of every prompt token (OpenAI's ``echo``).
    ``speculation`` says whether tokens may be drafted; how they are chosen stays the same.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: Literal["auto", "off"] = "auto"

    def scores(self, prompt_len: int) -> int:
        """Return how many log-probabilities the sequence may get: one per token scored and one per alternative."""
        of_prompt = 0 if self.prompt_logprobs is None else prompt_len * (1 + self.prompt_logprobs)
        return of_prompt + (0 if self.logprobs is None else self.max_tokens * (1 + self.logprobs))


SCORES_PER_TOKEN = 32
"""How many scores are charged like one token: finding, sending and printing them takes about as long."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate.

    ``token_ids`` holds the prompt and then the tokens that earlier attempts delivered; ``prompt_len`` is where
    the prompt ends. Between gateway and worker the prompt may stand in Redis instead: then ``prompt`` is its name, and
    ``token_ids`` has only what follows it. ``attempt`` is the fencing token: results of a lower attempt are refused.
    ``deadline_ms`` is absolute, by Redis TIME; ``reply_to`` the result stream of a gateway process, which reads
    messages up to the version ``wire``. ``queued_ms`` is how long this attempt waited in the queue, 0 before.
    Requests share cached prefixes with those alone that have the same ``cache_salt``. ``traceparent`` is the context of
    this attempt's span (:mod:`services.runtime.tracing`); empty where the request is not traced.
    """

    id: str
    attempt: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    deadline_ms: int
    priority: int
    tenant: str
    reply_to: str
    prompt: str = ""
    wire: int = OLDEST_WIRE
    cache_salt: str = ""
    queued_ms: int = 0
    traceparent: str = ""

    @property
    def max_len(self) -> int:
        """Tokens of the sequence if nothing ends it before ``max_tokens``."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def cost(self) -> int:
        """Tokens charged to the tenant and to a worker's credit: the prompt, the longest answer, a share for scores."""
        return self.max_len + -(-self.sampling.scores(self.prompt_len) // SCORES_PER_TOKEN)

    def traced(self, traceparent: str) -> GenerateRequest:
        """Return this request with the context under which it is traced."""
        return msgspec.structs.replace(self, traceparent=traceparent)

    @property
    def delivered(self) -> int:
        """Generated tokens that the client already has; the first new token gets this index."""
        return len(self.token_ids) - (0 if self.prompt else self.prompt_len)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution, and the likeliest ``top`` (id, logprob)."""

    logprob: float
    top: list[tuple[int, float]] = []


class PromptScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities of prompt tokens from position ``start`` on, as little-endian arrays without gaps.

    ``logprobs`` has a float32 for each token; ``top_ids`` (int32) and ``top_logprobs`` (float32) have ``width``
    alternatives for each, likeliest first. Four bytes a number: as objects they would take fifty.
    """

    start: int
    width: int
    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    def __len__(self) -> int:
        """Return how many tokens are scored."""
        return len(self.logprobs) // 4

    @property
    def nbytes(self) -> int:
        return len(self.logprobs) + len(self.top_ids) + len(self.top_logprobs)

    def each(self) -> Iterator[TokenLogprob]:
        """Yield the log-probabilities token by token."""
        width = self.width
        ids = struct.unpack(f"<{len(self) * width}i", self.top_ids)
        values = struct.unpack(f"<{len(self) * width}f", self.top_logprobs)
        for row, logprob in enumerate(struct.unpack(f"<{len(self)}f", self.logprobs)):
            part = slice(row * width, (row + 1) * width)
            yield TokenLogprob(logprob, list(zip(ids[part], values[part], strict=True)))


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="token"):
    """One token of a request, or its end. ``index`` counts generated tokens from 0 over all attempts.

    ``token_id`` is None where the request ends without a further token (cancelled, error, ``max_tokens`` 0), and where
    the event brings ``scores`` alone: those of a part of the prompt, in order, before the first token of an attempt.
    A gateway that reads version 1 only gets ``prompt_logprobs`` instead, once, with the first event of an attempt; its
    first element is None. ``cached_tokens`` and the request's ``queued_ms`` come with the first token of an attempt.
    """

    request_id: str
    attempt: int
    index: int
    token_id: int | None = None
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    scores: PromptScores | None = None
    queued_ms: int = 0

    @property
    def nbytes(self) -> int:
        """Roughly the bytes that the event takes while it waits to be sent."""
        of_token = 0 if self.logprob is None else len(self.logprob.top)
        of_prompt = sum(1 + len(each.top) for each in self.prompt_logprobs or () if each)
        return EVENT_BYTES + SCORE_BYTES * (of_token + of_prompt) + (self.scores.nbytes if self.scores else 0)


EVENT_BYTES, SCORE_BYTES = 128, 16


def event_bytes(events: Sequence[TokenEvent]) -> int:
    """Return roughly the bytes that ``events`` take while they wait to be sent. Most are plain; a step has hundreds."""
    plain = EVENT_BYTES * len(events)
    rich = (event for event in events if event.logprob or event.scores or event.prompt_logprobs)
    return plain + sum(event.nbytes - EVENT_BYTES for event in rich)


class AttemptLost(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="lost"):
    """The attempt before ``attempt`` is over without an end: resubmit as ``attempt`` with what was delivered."""

    request_id: str
    attempt: int
    reason: str


ResultEvent = TokenEvent | AttemptLost


class Assign(msgspec.Struct, frozen=True, array_like=True, tag="assign"):
    """Scheduler to worker: this request is yours, under lease."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Gateway or scheduler to worker: stop this request if the attempt that you hold is at most ``attempt``."""

    request_id: str
    attempt: int


InboxMessage = Assign | Cancel


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of an attention worker. Ids are incarnations, never reused. ``process`` is the name that the process
    has in its logs and in metrics, such as attention-1, if a supervisor gave it one."""

    id: str
    model: str
    fingerprint: str
    kv_tokens: int
    max_num_seqs: int
    max_model_len: int
    host: str
    pid: int
    version: str
    metrics_url: str | None = None
    wire: int = OLDEST_WIRE
    weights: str = ""
    process: str = ""

    @property
    def name(self) -> str:
        """The name by which people know the worker."""
        return self.process or self.id


SeatStatus = Literal["waiting", "loading", "ready", "leaving"]
"""State of an expert worker: it has no group, loads one, serves it, or is about to end."""


class ExpertInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of an expert worker, which asks for a seat. Ids are incarnations, never reused.

    It listens on ``host``:``port`` and has room for ``max_experts`` of a layer, if that is limited. ``capacity`` is its
    speed relative to the others, ``group`` the shard group that it would rather hold, ``pod`` its pod's name on
    Kubernetes, ``process`` the process's name as in :class:`WorkerInfo`. The model has ``num_experts`` in each of
    ``layers``. Nobody reads ``memory_bytes`` any more, but an
    older release requires it.
    """

    id: str
    fingerprint: str
    host: str
    port: int
    memory_bytes: int
    pid: int
    version: str
    node: str = ""
    capacity: float = 1.0
    metrics_url: str | None = None
    group: int | None = None
    num_experts: int = 0
    layers: tuple[int, ...] = ()
    max_experts: int | None = None
    pod: str | None = None
    weights: str = ""
    process: str = ""

    @property
    def name(self) -> str:
        """The name by which people know the worker."""
        return self.process or self.id


class SeatLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds since the seat's group was loaded: in all, spent computing, and spent by calls that waited for others.

    These are totals, as in all loads: a report may be lost, and two of them give the rates between.
    """

    up_s: float
    busy_s: float
    waited_s: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds of an attention worker: in all, in steps, and waiting within steps, by the shard group waited for.

    ``lanes`` counts the micro-batches of its last step: so many exchanges are in flight at a time.
    """

    up_s: float
    busy_s: float
    stalled_s: dict[int, float] = {}
    lanes: int = 1
    wire: int = OLDEST_WIRE


LATENCY_EDGES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)
"""A latency over its target falls into the bucket of the first edge that it does not exceed, or into one more."""
LATENCY_BUCKETS = len(LATENCY_EDGES) + 1


def latency_bucket(seconds: float, target_s: float) -> int:
    """Return the number of the bucket into which a latency falls."""
    return bisect_left(LATENCY_EDGES, seconds / target_s)


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True):
    """How many latencies were at most each of ``bounds``, in seconds, and how many there were in all: ``counts`` is one
    longer. Totals since the process began, as Prometheus has them."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Work of a gateway since its start: seconds in all and of computing, sequences that came and that ended, how many
    latencies fell into each bucket of :data:`LATENCY_EDGES`, and ``latencies`` as its histograms count them: ttft, tpot
    and itl (inter-token latency)."""

    up_s: float
    cpu_s: float
    came: int
    ended: int
    ttft: tuple[int, ...]
    tpot: tuple[int, ...]
    wire: int = OLDEST_WIRE
    latencies: dict[str, LatencyCounts] = {}


class SeatReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Report of an expert worker in each heartbeat. ``digest`` names the experts of ``group`` that are loaded."""

    status: SeatStatus
    group: int | None = None
    digest: str = ""
    outstanding_rows: int = 0
    load: SeatLoad | None = None


class SeatRows(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Rows that a seat computed since it loaded the group ``digest``: layer -> one count per expert, ascending.

    These are totals, so that a report may be lost or come twice; :meth:`since` counts the rows between two of them.
    """

    digest: str
    rows: dict[int, tuple[int, ...]]

    def since(self, earlier: SeatRows | None) -> dict[int, tuple[int, ...]]:
        """Return the rows computed after ``earlier``; all rows if ``earlier`` counted another group."""
        if earlier is None or earlier.digest != self.digest:
            return self.rows
        return {
            layer: tuple(now - then for now, then in zip(counts, earlier.rows[layer], strict=True))
            if layer in earlier.rows
            else counts
            for layer, counts in self.rows.items()
        }


_encoder = msgspec.msgpack.Encoder()

Message = GenerateRequest | InboxMessage | WorkerInfo | ExpertInfo | SeatReport | SeatRows | WorkerLoad | GatewayLoad


def claim_of(info: WorkerInfo | ExpertInfo) -> str:
    """Return what a worker claims a namespace for: its model and, where they are known, the hash of its weights."""
    return f"{info.fingerprint}/{info.weights}" if info.weights else info.fingerprint


def encode(message: Message | Sequence[ResultEvent]) -> bytes:
    """Return ``message`` as msgpack bytes."""
    return _encoder.encode(message)


# Each takes bytes, and raises UnreadableMessage.
decode_request = partial(read, Decoder(GenerateRequest), "a request")
decode_results = partial(read, Decoder(list[ResultEvent]), "a list of events")
decode_inbox: Callable[[bytes], InboxMessage] = partial(
    read, Decoder(InboxMessage), "a message for an attention worker"
)
decode_worker = partial(read, Decoder(WorkerInfo), "the record of an attention worker")
decode_expert = partial(read, Decoder(ExpertInfo), "the record of an expert worker")
decode_seat_report = partial(read, Decoder(SeatReport), "the report of an expert worker")
decode_seat_rows = partial(read, Decoder(SeatRows), "the rows of an expert worker")
decode_worker_load = partial(read, Decoder(WorkerLoad), "the load of an attention worker")
decode_gateway_load = partial(read, Decoder(GatewayLoad), "the load of a gateway")
