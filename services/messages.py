"""The wire: every message that crosses a process boundary, and its codec. Torch-free.

Events, inbox messages and the reports of seats are msgpack arrays: their field order is part of the wire, new fields
go last. Requests and workers are maps. In all of them a new field has a default.
Ids and lengths are counted in tokens, times in milliseconds by Redis TIME.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

from services.errors import ErrorInfo

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


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate.

    ``token_ids`` holds the prompt and then the tokens that earlier attempts delivered; ``prompt_len`` is where
    the prompt ends. ``attempt`` is the fencing token: results of a lower attempt are refused.
    ``deadline_ms`` is absolute, by Redis TIME; ``reply_to`` the result stream of a gateway process.
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
    cache_salt: str = ""

    @property
    def cost(self) -> int:
        """Tokens charged to the tenant and to a worker's credit: the prompt and all that may follow it."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def delivered(self) -> int:
        """Generated tokens that the client already has; the first new token gets this index."""
        return len(self.token_ids) - self.prompt_len


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution, and the ``top`` (id, logprob) beside it."""

    logprob: float
    top: list[tuple[int, float]] = []


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="token"):
    """One token of a request, or its end. ``index`` counts generated tokens from 0 over all attempts.

    ``token_id`` is None where the request ends without a further token (cancelled, error, ``max_tokens`` 0).
    ``prompt_logprobs`` comes once, with the first event of an attempt; its first element is None.
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


def decode_request(data: bytes) -> GenerateRequest:
    return _request_decoder.decode(data)


def decode_results(data: bytes) -> list[ResultEvent]:
    return _results_decoder.decode(data)


def decode_inbox(data: bytes) -> InboxMessage:
    return _inbox_decoder.decode(data)


def decode_worker(data: bytes) -> WorkerInfo:
    return _worker_decoder.decode(data)


def decode_expert(data: bytes) -> ExpertInfo:
    return _expert_decoder.decode(data)


def decode_seat_report(data: bytes) -> SeatReport:
    return _report_decoder.decode(data)


def decode_seat_rows(data: bytes) -> SeatRows:
    return _rows_decoder.decode(data)


def decode_worker_load(data: bytes) -> WorkerLoad:
    return _worker_load_decoder.decode(data)


def decode_gateway_load(data: bytes) -> GatewayLoad:
    return _gateway_load_decoder.decode(data)
