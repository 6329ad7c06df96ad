"""The wire: every message that crosses a process boundary, and its codec. Torch-free.

Events, inbox messages and the reports of seats are msgpack arrays: their field order is part of the wire, new fields
go last. Requests and workers are maps. In all of them a new field has a default.
Ids and lengths are counted in tokens, times in milliseconds by Redis TIME.

Everything is of a version (:data:`services.wire.WIRE`). Members of a deployment tell which versions they read, and what
is written is of the newest that all of its readers know, so processes of one release and of the next serve together.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from services.errors import ErrorInfo
from services.wire import OLDEST_WIRE, read

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch their filters off.

    ``seed`` and ``choice`` key the Gumbel noise together with the position and the token, so a draw depends
    on nothing else. ``logprobs`` asks for that many alternatives per generated token (0: the drawn token's
    log-probability alone); ``prompt_logprobs`` for the same of every prompt token (OpenAI's ``echo``).
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

    def scores(self, prompt_len: int) -> int:
        """Numbers that log-probabilities of this sequence are at most: one for each token scored and each alternative
        beside it."""
        of_prompt = 0 if self.prompt_logprobs is None else prompt_len * (1 + self.prompt_logprobs)
        return of_prompt + (0 if self.logprobs is None else self.max_tokens * (1 + self.logprobs))


SCORES_PER_TOKEN = 32
"""So many scores are charged like one token: to find, send and print them takes about as long as to compute it."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate.

    ``token_ids`` holds the prompt and then the tokens that earlier attempts delivered; ``prompt_len`` is where
    the prompt ends. Between gateway and worker the prompt may stand in Redis instead: then ``prompt`` is its name, and
    ``token_ids`` has only what follows it. ``attempt`` is the fencing token: results of a lower attempt are refused.
    ``deadline_ms`` is absolute, by Redis TIME; ``reply_to`` the result stream of a gateway process, which reads
    messages up to the version ``wire``.
    Requests share cached prefixes with those alone that have the same ``cache_salt``.
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

    @property
    def max_len(self) -> int:
        """Tokens of the sequence if nothing ends it before ``max_tokens``."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def cost(self) -> int:
        """Tokens charged to the tenant and to a worker's credit: the prompt, all that may follow it, and a share for
        the scores that are asked for."""
        return self.max_len + -(-self.sampling.scores(self.prompt_len) // SCORES_PER_TOKEN)

    @property
    def delivered(self) -> int:
        """Generated tokens that the client already has; the first new token gets this index."""
        return len(self.token_ids) - (0 if self.prompt else self.prompt_len)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution, and the ``top`` (id, logprob) beside it."""

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
        """Tokens scored."""
        return len(self.logprobs) // 4

    @property
    def nbytes(self) -> int:
        return len(self.logprobs) + len(self.top_ids) + len(self.top_logprobs)

    def each(self) -> Iterator[TokenLogprob]:
        """Those of one token after the other."""
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
    first element is None.
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

    @property
    def nbytes(self) -> int:
        """About what the event takes while it waits to be sent."""
        of_token = 0 if self.logprob is None else len(self.logprob.top)
        of_prompt = sum(1 + len(each.top) for each in self.prompt_logprobs or () if each)
        return EVENT_BYTES + SCORE_BYTES * (of_token + of_prompt) + (self.scores.nbytes if self.scores else 0)


EVENT_BYTES, SCORE_BYTES = 128, 16


def event_bytes(events: Sequence[TokenEvent]) -> int:
    """About what ``events`` take while they wait to be sent. Most are plain, and there are hundreds in a step."""
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
    """To a worker: stop this request if the attempt you hold is at most ``attempt``."""

    request_id: str
    attempt: int


InboxMessage = Assign | Cancel


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an attention worker tells about itself when it registers. Ids are incarnations, never reused."""

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


SeatStatus = Literal["waiting", "loading", "ready", "leaving"]
"""Of an expert worker: without a group, fetching one, serving it, about to end."""


class ExpertInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an expert worker tells about itself when it takes a seat. Ids are incarnations, never reused.

    It listens on ``host``:``port`` and has ``memory_bytes`` for experts, and room for ``max_experts`` of a layer, if
    that is limited. ``capacity`` is its speed against the others; ``group`` the shard group that it would rather hold.
    ``pod``: its pod's name on Kubernetes. The model has ``num_experts`` in each of ``layers``.
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


class SeatLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds since the seat's group was loaded: in all, spent computing, and spent by calls that waited for others.

    Totals, as in all loads: a report may be lost, and whoever reads two of them knows the rates between.
    """

    up_s: float
    busy_s: float
    waited_s: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds of an attention worker: in all, in steps, and in steps but waiting, by the shard group waited for.

    ``lanes``: micro-batches of its last step, so many exchanges it has under way at a time.
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
    """Number of the bucket into which it falls."""
    return bisect_left(LATENCY_EDGES, seconds / target_s)


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of a gateway, since its start: seconds, those of them its process computed, sequences that came and that ended,
    and how many latencies fell into each bucket of :data:`LATENCY_EDGES`."""

    up_s: float
    cpu_s: float
    came: int
    ended: int
    ttft: tuple[int, ...]
    tpot: tuple[int, ...]
    wire: int = OLDEST_WIRE


class SeatReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an expert worker says with each heartbeat. ``digest`` tells which experts of ``group`` it has loaded."""

    status: SeatStatus
    group: int | None = None
    digest: str = ""
    outstanding_rows: int = 0
    load: SeatLoad | None = None


class SeatRows(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Rows that a seat computed since it loaded the group ``digest``: layer -> one count per expert, ascending.

    Totals, so that a report may be lost or come twice; :meth:`since` is what came between two of them.
    """

    digest: str
    rows: dict[int, tuple[int, ...]]

    def since(self, earlier: SeatRows | None) -> dict[int, tuple[int, ...]]:
        """Rows after ``earlier``; all where ``earlier`` counted another group."""
        if earlier is None or earlier.digest != self.digest:
            return self.rows
        return {
            layer: tuple(now - then for now, then in zip(counts, earlier.rows[layer], strict=True))
            if layer in earlier.rows
            else counts
            for layer, counts in self.rows.items()
        }


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_results_decoder = msgspec.msgpack.Decoder(list[ResultEvent])
_inbox_decoder: msgspec.msgpack.Decoder[InboxMessage] = msgspec.msgpack.Decoder(InboxMessage)
_worker_decoder = msgspec.msgpack.Decoder(WorkerInfo)
_expert_decoder = msgspec.msgpack.Decoder(ExpertInfo)
_report_decoder = msgspec.msgpack.Decoder(SeatReport)
_rows_decoder = msgspec.msgpack.Decoder(SeatRows)
_worker_load_decoder = msgspec.msgpack.Decoder(WorkerLoad)
_gateway_load_decoder = msgspec.msgpack.Decoder(GatewayLoad)

Message = GenerateRequest | InboxMessage | WorkerInfo | ExpertInfo | SeatReport | SeatRows | WorkerLoad | GatewayLoad


def encode(message: Message | Sequence[ResultEvent]) -> bytes:
    """``message`` as msgpack bytes."""
    return _encoder.encode(message)


# Each raises UnreadableMessage.


def decode_request(data: bytes) -> GenerateRequest:
    return read(_request_decoder, data, "a request")


def decode_results(data: bytes) -> list[ResultEvent]:
    return read(_results_decoder, data, "a list of events")


def decode_inbox(data: bytes) -> InboxMessage:
    return read(_inbox_decoder, data, "a message for an attention worker")


def decode_worker(data: bytes) -> WorkerInfo:
    return read(_worker_decoder, data, "the record of an attention worker")


def decode_expert(data: bytes) -> ExpertInfo:
    return read(_expert_decoder, data, "the record of an expert worker")


def decode_seat_report(data: bytes) -> SeatReport:
    return read(_report_decoder, data, "the report of an expert worker")


def decode_seat_rows(data: bytes) -> SeatRows:
    return read(_rows_decoder, data, "the rows of an expert worker")


def decode_worker_load(data: bytes) -> WorkerLoad:
    return read(_worker_load_decoder, data, "the load of an attention worker")


def decode_gateway_load(data: bytes) -> GatewayLoad:
    return read(_gateway_load_decoder, data, "the load of a gateway")
