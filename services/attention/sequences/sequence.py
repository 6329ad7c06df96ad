"""A request's state in the engine: which tokens are known, which are computed, and when it ends. Pure Python.

A sequence is the prompt followed by all generated tokens. ``computed`` counts the leading tokens whose KV is in the
blocks. The token that was drawn last is known but not computed, so a decoding sequence has exactly one to compute,
beside drafts of what may follow, which are not of the sequence until they are drawn. Its :class:`DrawRow` holds what
the sampler needs, with the key of its draws: a 64-bit word made of seed and choice, with which each draw mixes its
position (:mod:`services.attention.sampling.noise`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.errors import ContextLengthExceeded, InvalidRequest, RequestError
from services.messages import FinishReason, GenerateRequest, PromptScores, SamplingParams, TokenEvent, TokenLogprob
from services.prefix import PrefixScope, prefix_chain, prefix_root
from services.wire import NAMED_PROMPTS, NO_PROMPT

_MASK64 = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(z: int) -> int:
    """Return one step of SplitMix64: a bijection of 64-bit words without visible structure."""
    z = (z + _STEP) & _MASK64
    z = ((z ^ z >> 30) * _FIRST) & _MASK64
    z = ((z ^ z >> 27) * _SECOND) & _MASK64
    return z ^ z >> 31


def sequence_key(seed: int, choice: int) -> int:
    """Return the common part of the keys of a sequence's draws. Takes any integers, modulo 2^64."""
    return mix64(mix64(seed & _MASK64) ^ choice & _MASK64)


def draw_keys(sequence_keys: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Return the key of a draw for each sequence at its position: ``mix64(sequence_key ^ position)``."""
    z = np.array(sequence_keys, dtype=np.uint64) ^ np.array(positions, dtype=np.uint64)
    z += np.uint64(_STEP)  # wraps, as unsigned arrays do
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    return z ^ z >> np.uint64(31)


@dataclass(kw_only=True, slots=True, eq=False)
class DrawRow:
    """A draw as the sampler sees it. ``token_ids`` are all tokens of its sequence so far, and grow; ``stop_ids`` may
    end it. ``drafts`` counts the drafts between these tokens and the draw."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    stop_ids: frozenset[int] = frozenset()
    drafts: int = 0
    may_edit: bool = field(init=False)
    """Whether penalties, biases or bans change the logits in any step."""
    looks_back: bool = field(init=False)
    """Whether the tokens before a draw change its logits (penalties)."""
    samples: bool = field(init=False)
    """Whether tokens are drawn with a temperature."""
    filters: bool = field(init=False)
    """Whether top_k, top_p or min_p leave tokens out."""
    key: int = field(init=False)
    """See :func:`sequence_key`."""
    narrow_heads: int = field(init=False, default=0)
    """How many widths were too narrow for its filters; see :mod:`services.attention.sampling.filters`."""
    _behind: dict[tuple[int, int], DrawRow] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        params = self.params
        self.samples = params.temperature > 0
        self.filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.key = sequence_key(params.seed, params.choice)
        self.looks_back = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.may_edit = self.looks_back or bool(params.logit_bias) or (params.min_tokens > 0 and bool(self.stop_ids))

    def after(self, drafts: int, number: int = 0) -> DrawRow:
        """Return the draw of the same sequence after so many drafts; the same object each time for a ``number``, in
        which draws differ that come after equally many."""
        if not drafts:
            return self
        if (drafts, number) not in self._behind:
            self._behind[drafts, number] = DrawRow(
                params=self.params,
                token_ids=self.token_ids,
                prompt_len=self.prompt_len,
                stop_ids=self.stop_ids,
                drafts=drafts,
            )
        return self._behind[drafts, number]

    def position(self, ahead: int) -> int:
        """Return the position of the draw when ``ahead`` more tokens are known than ``token_ids`` has."""
        return len(self.token_ids) + self.drafts + ahead

    def generated(self, ahead: int) -> int:
        """Return how many tokens come after the prompt and before the draw."""
        return self.position(ahead) - self.prompt_len

    def bans_stop(self, ahead: int) -> bool:
        return self.generated(ahead) < self.params.min_tokens and bool(self.stop_ids)


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """State of a sequence, owned and changed by the batch manager. ``arrival`` and ``admission`` are running numbers.

    ``scored`` counts the leading prompt tokens whose scores are known, the first of which has none; None: the request
    asks for none, or has all. It survives a preemption, so that no position is scored twice.
    """

    request: GenerateRequest
    arrival: int
    stop_ids: frozenset[int]
    token_ids: list[int]
    scored: int | None
    row: DrawRow
    limit: int
    """Length at which ``max_tokens`` ends the sequence."""
    computed: int = 0
    prefilling: bool = True
    admission: int = -1
    preempted: bool = False
    cached_tokens: int = 0
    queued_ms: int = 0
    came_at: float = 0.0
    began_at: float = 0.0
    """When the sequence came, and when its first step was planned: 0 before that, and after the first token. Seconds by
    the engine's timer."""
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    kept_scores: list[PromptScores] = field(default_factory=list)
    """Scores kept for a gateway that reads them only with the first token."""

    @property
    def generated(self) -> int:
        """Generated tokens, including those of earlier attempts; also the index of the next one."""
        return len(self.token_ids) - self.request.prompt_len

    @property
    def wants_token(self) -> bool:
        return len(self.token_ids) < self.limit

    def running_key(self) -> tuple[int, int]:
        """Return the sort key of the batch. The last sequence in this order is preempted first."""
        return self.request.priority, self.admission

    def extend_chain(self, block_size: int, blocks: int, scope: PrefixScope) -> list[bytes]:
        """Return the names of the first ``blocks`` full blocks. Only new ones are hashed."""
        chain, request = self.chain, self.request
        new = self.token_ids[len(chain) * block_size : blocks * block_size]
        if new:
            parent = chain[-1] if chain else prefix_root(scope, request.tenant, request.cache_salt)
            chain.extend(prefix_chain(new, block_size, parent))
        return chain[:blocks]

    def score(self, scores: PromptScores) -> list[TokenEvent]:
        """Add the scores of the next prompt tokens. Returns the events that carry them."""
        assert self.scored == scores.start
        self.scored += len(scores)
        if self.scored == self.request.prompt_len:
            self.scored = None
        if self.request.wire < NAMED_PROMPTS:
            self.kept_scores.append(scores)
            return []
        return [
            TokenEvent(request_id=self.request.id, attempt=self.request.attempt, index=self.generated, scores=scores)
        ]

    def take(self, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Append a drawn token. Returns its event, with a ``finish`` if it ends the sequence."""
        token_ids, request = self.token_ids, self.request
        index = len(token_ids) - request.prompt_len
        token_ids.append(token_id)
        finish: FinishReason | None = None if len(token_ids) < self.limit else "length"
        if token_id in self.stop_ids:
            finish = "stop"
        if not (
            self.kept_scores or self.cached_tokens or self.queued_ms
        ):  # not the first of an attempt, or nothing goes with it
            return TokenEvent(
                request_id=request.id,
                attempt=request.attempt,
                index=index,
                token_id=token_id,
                finish=finish,
                logprob=logprob,
            )
        return self.event(index, token_id, finish, logprob)

    def event(
        self,
        index: int,
        token_id: int | None = None,
        finish: FinishReason | None = None,
        logprob: TokenLogprob | None = None,
        error: RequestError | None = None,
    ) -> TokenEvent:
        """Make an event; the first of an attempt carries what was kept for it."""
        request = self.request
        kept, cached_tokens, queued_ms = self.kept_scores, self.cached_tokens, self.queued_ms
        self.kept_scores, self.cached_tokens, self.queued_ms = [], 0, 0
        whole = kept and self.scored is None and error is None  # a cancel can come between two chunks
        return TokenEvent(
            request_id=request.id,
            attempt=request.attempt,
            index=index,
            token_id=token_id,
            finish=finish,
            logprob=logprob,
            prompt_logprobs=[None, *(score for scores in kept for score in scores.each())] if whole else None,
            error=error.info() if error else None,
            cached_tokens=cached_tokens,
            queued_ms=queued_ms,
        )


def open_sequence(request: GenerateRequest, arrival: int, eos_token_ids: Iterable[int]) -> SequenceState:
    """Return the state of ``request`` before its first step."""
    params = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    token_ids = list(request.token_ids)
    state = SequenceState(
        request=request,
        arrival=arrival,
        stop_ids=stop_ids,
        token_ids=token_ids,
        scored=None if params.prompt_logprobs is None else 1,
        queued_ms=request.queued_ms,
        row=DrawRow(params=params, token_ids=token_ids, prompt_len=request.prompt_len, stop_ids=stop_ids),
        limit=request.max_len,
    )
    if state.scored == request.prompt_len:  # one token, which has no score
        state.score(PromptScores(start=1, width=0, logprobs=b""))
    return state


def refusal(request: GenerateRequest, *, max_model_len: int, kv_tokens: int, vocab_size: int) -> RequestError | None:
    """Return why ``request`` can never run on this worker, or None."""
    if not 0 < request.prompt_len <= len(request.token_ids):
        return InvalidRequest(NO_PROMPT, hint="Send at least one token.", param="prompt")
    if not _all_ids(request.token_ids, vocab_size) or not _all_ids(list(request.sampling.logit_bias), vocab_size):
        return InvalidRequest(f"A token id is outside the vocabulary of {vocab_size} tokens.", param="prompt")
    wanted = f"{request.prompt_len} prompt tokens and max_tokens {request.sampling.max_tokens}"
    if request.max_len > max_model_len:
        return ContextLengthExceeded(
            f"The model's context holds {max_model_len} tokens, but the request needs {wanted}.",
            hint="Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if request.max_len > kv_tokens:
        return ContextLengthExceeded(
            f"This worker's KV cache holds {kv_tokens} tokens, but the request needs {wanted}.",
            hint="Shorten the prompt, lower max_tokens, or start the worker with more --kv-memory-gib (on a GPU also "
            "--gpu-memory-utilization).",
            param="max_tokens",
        )
    return None


def _all_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
