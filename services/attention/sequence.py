"""One held request on its way through the engine: what is known, what is computed, and when it ends. Pure Python.

A sequence is the prompt followed by all generated tokens. ``computed`` counts the leading tokens whose KV lies in
the blocks; the token drawn last is always known but not computed, so a decoding sequence has exactly one to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.attention.draw_row import DrawRow
from services.errors import ContextLengthExceeded, InvalidRequest, RequestError
from services.messages import FinishReason, GenerateRequest, TokenEvent, TokenLogprob
from services.prefix import PrefixScope, prefix_chain, prefix_root


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """Mutable; owned by the batch manager. ``arrival`` and ``admission`` are running numbers.

    ``prompt_logprobs`` grows with the prompt if the request asks for it and is None once sent (or not asked for).
    It survives a preemption, so no position is scored twice.
    """

    request: GenerateRequest
    arrival: int
    stop_ids: frozenset[int]
    token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
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

    @property
    def generated(self) -> int:
        """Generated tokens, those of earlier attempts included; also the index of the next one."""
        return len(self.token_ids) - self.request.prompt_len

    @property
    def wants_token(self) -> bool:
        return len(self.token_ids) < self.limit

    def waiting_key(self) -> tuple[int, int]:
        """Order among the waiting. Of one priority, a preempted sequence arrived before all that never started."""
        return self.request.priority, self.arrival

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

    def take(self, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Append a token that was drawn; its event, with a ``finish`` if it ends the sequence."""
        token_ids, request = self.token_ids, self.request
        index = len(token_ids) - request.prompt_len
        token_ids.append(token_id)
        finish: FinishReason | None = None if len(token_ids) < self.limit else "length"
        if token_id in self.stop_ids:
            finish = "stop"
        if self.prompt_logprobs is None and not self.cached_tokens:  # not the first of an attempt
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
        """The event to send; the first of an attempt takes the prompt's log-probabilities along."""
        request = self.request
        scores, cached_tokens = self.prompt_logprobs, self.cached_tokens
        self.prompt_logprobs, self.cached_tokens = None, 0
        whole = scores is not None and len(scores) == request.prompt_len  # a cancel can come between two chunks
        return TokenEvent(
            request_id=request.id,
            attempt=request.attempt,
            index=index,
            token_id=token_id,
            finish=finish,
            logprob=logprob,
            prompt_logprobs=scores if whole and error is None else None,
            error=error.info() if error else None,
            cached_tokens=cached_tokens,
        )


def open_sequence(request: GenerateRequest, arrival: int, eos_token_ids: Iterable[int]) -> SequenceState:
    """The state of ``request`` before its first step."""
    params = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    token_ids = list(request.token_ids)
    return SequenceState(
        request=request,
        arrival=arrival,
        stop_ids=stop_ids,
        token_ids=token_ids,
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        row=DrawRow(params=params, token_ids=token_ids, prompt_len=request.prompt_len, stop_ids=stop_ids),
        limit=request.cost,
    )


def refusal(request: GenerateRequest, *, max_model_len: int, kv_tokens: int, vocab_size: int) -> RequestError | None:
    """Why ``request`` can never run on this worker, or None."""
    if not 0 < request.prompt_len <= len(request.token_ids):
        return InvalidRequest("The prompt is empty.", hint="Send at least one token.", param="prompt")
    if not _all_ids(request.token_ids, vocab_size) or not _all_ids(list(request.sampling.logit_bias), vocab_size):
        return InvalidRequest(f"A token id is outside the vocabulary of {vocab_size} tokens.", param="prompt")
    wanted = f"{request.prompt_len} prompt tokens and max_tokens {request.sampling.max_tokens}"
    if request.cost > max_model_len:
        return ContextLengthExceeded(
            f"The model's context holds {max_model_len} tokens, but {wanted} were asked for.",
            hint="Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if request.cost > kv_tokens:
        return ContextLengthExceeded(
            f"This worker's KV cache holds {kv_tokens} tokens, but {wanted} were asked for.",
            hint="Shorten the prompt, lower max_tokens, or start the worker with more --kv-blocks.",
            param="max_tokens",
        )
    return None


def _all_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
