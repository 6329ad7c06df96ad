"""One held request on its way through the engine: what is known, what is computed, and when it ends. Pure Python.

A sequence is the prompt followed by all generated tokens. ``computed`` counts the leading tokens whose KV lies in
the blocks; the token drawn last is always known but not computed, so a decoding sequence has exactly one to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.attention.sequences.request_state import DrawRow
from services.errors import ContextLengthExceeded, InvalidRequest, RequestError
from services.messages import FinishReason, GenerateRequest, PromptScores, TokenEvent, TokenLogprob
from services.prefix import PrefixScope, prefix_chain, prefix_root
from services.wire import APART, NO_PROMPT


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """Mutable; owned by the batch manager. ``arrival`` and ``admission`` are running numbers.

    ``scored`` counts the leading prompt tokens whose scores are known, the first of which has none; None: the request
    asks for none, or has them. It survives a preemption, so no position is scored twice.
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
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    kept_scores: list[PromptScores] = field(default_factory=list)
    """For a gateway that reads them with the first token only."""

    @property
    def generated(self) -> int:
        """Generated tokens, those of earlier attempts included; also the index of the next one."""
        return len(self.token_ids) - self.request.prompt_len

    @property
    def wants_token(self) -> bool:
        return len(self.token_ids) < self.limit

    def running_key(self) -> tuple[int, int]:
        """Order in the batch. The last in it is preempted first."""
        return self.request.priority, self.admission

    def extend_chain(self, block_size: int, blocks: int, scope: PrefixScope) -> list[bytes]:
        """Names of the first ``blocks`` full blocks, hashing only those that are new."""
        chain, request = self.chain, self.request
        new = self.token_ids[len(chain) * block_size : blocks * block_size]
        if new:
            parent = chain[-1] if chain else prefix_root(scope, request.tenant, request.cache_salt)
            chain.extend(prefix_chain(new, block_size, parent))
        return chain[:blocks]

    def score(self, scores: PromptScores) -> list[TokenEvent]:
        """Take scores of prompt tokens in, the next in order; the events that bring them."""
        assert self.scored == scores.start
        self.scored += len(scores)
        if self.scored == self.request.prompt_len:
            self.scored = None
        if self.request.wire < APART:
            self.kept_scores.append(scores)
            return []
        return [
            TokenEvent(request_id=self.request.id, attempt=self.request.attempt, index=self.generated, scores=scores)
        ]

    def take(self, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Append a token that was drawn; its event, with a ``finish`` if it ends the sequence."""
        token_ids, request = self.token_ids, self.request
        index = len(token_ids) - request.prompt_len
        token_ids.append(token_id)
        finish: FinishReason | None = None if len(token_ids) < self.limit else "length"
        if token_id in self.stop_ids:
            finish = "stop"
        if not self.kept_scores and not self.cached_tokens:  # not the first of an attempt, or nothing goes with it
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
        """The event to send; the first of an attempt takes along what was kept for it."""
        request = self.request
        kept, cached_tokens = self.kept_scores, self.cached_tokens
        self.kept_scores, self.cached_tokens = [], 0
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
        )


def open_sequence(request: GenerateRequest, arrival: int, eos_token_ids: Iterable[int]) -> SequenceState:
    """The state of ``request`` before its first step."""
    params = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    token_ids = list(request.token_ids)
    state = SequenceState(
        request=request,
        arrival=arrival,
        stop_ids=stop_ids,
        token_ids=token_ids,
        scored=None if params.prompt_logprobs is None else 1,
        row=DrawRow(params=params, token_ids=token_ids, prompt_len=request.prompt_len, stop_ids=stop_ids),
        limit=request.max_len,
    )
    if state.scored == request.prompt_len:  # one token, which has no score
        state.score(PromptScores(start=1, width=0, logprobs=b""))
    return state


def refusal(request: GenerateRequest, *, max_model_len: int, kv_tokens: int, vocab_size: int) -> RequestError | None:
    """Why ``request`` can never run on this worker, or None."""
    if not 0 < request.prompt_len <= len(request.token_ids):
        return InvalidRequest(NO_PROMPT, hint="Send at least one token.", param="prompt")
    if not _all_ids(request.token_ids, vocab_size) or not _all_ids(list(request.sampling.logit_bias), vocab_size):
        return InvalidRequest(f"A token id is outside the vocabulary of {vocab_size} tokens.", param="prompt")
    wanted = f"{request.prompt_len} prompt tokens and max_tokens {request.sampling.max_tokens}"
    if request.max_len > max_model_len:
        return ContextLengthExceeded(
            f"The model's context holds {max_model_len} tokens, but {wanted} were asked for.",
            hint="Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if request.max_len > kv_tokens:
        return ContextLengthExceeded(
            f"This worker's KV cache holds {kv_tokens} tokens, but {wanted} were asked for.",
            hint="Shorten the prompt, lower max_tokens, or start the worker with more --kv-memory-gib.",
            param="max_tokens",
        )
    return None


def _all_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
