"""Makes the dummy requests with which an engine warms up. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.attention.sequences.plan import BatchLimits
from services.messages import GenerateRequest, SamplingParams

MAX_AT_ONCE = 512
"""Most requests in a batch. Larger batches take kernels of the same shapes."""
DRAWN, SHORT = 3, 5
"""Tokens that a request draws, and tokens of a short prompt."""
NEVER_MS = 1 << 52


def dummy_batches(limits: BatchLimits, kv_tokens: int) -> Iterator[list[GenerateRequest]]:
    """Yield batches of requests: a step's longest prompt, then all sizes, greedily and with every kind of sampling.

    >>> bounds = BatchLimits(
    ...     max_num_seqs=3, max_num_batched_tokens=64, max_model_len=32, vocab_size=100, eos_token_ids=()
    ... )
    >>> [(len(asked), len(asked[0].token_ids)) for asked in dummy_batches(bounds, 4096)]
    [(1, 29), (1, 5), (1, 5), (2, 5), (2, 5), (3, 5), (3, 5)]
    """
    room = min(limits.max_model_len, kv_tokens)
    longest = min(limits.max_num_batched_tokens, room - DRAWN)
    if longest < 1:
        return
    yield [_request(limits, 0, longest, _plain(DRAWN))]
    for size in _sizes(min(limits.max_num_seqs, MAX_AT_ONCE)):
        steps = -(-SHORT * size // max(1, limits.max_num_batched_tokens - size))  # until the last prompt is through
        drawn, length = DRAWN + steps, min(SHORT, room - DRAWN - steps)
        if length > 0:
            kinds = _kinds(drawn)
            yield [_request(limits, at, length, _plain(drawn)) for at in range(size)]
            yield [_request(limits, at, length, kinds[at % len(kinds)]) for at in range(size)]


def _sizes(max_size: int) -> list[int]:
    """Return the powers of two up to ``max_size``, and ``max_size``."""
    return sorted({min(1 << power, max_size) for power in range(max_size.bit_length() + 1)})


def _plain(drawn: int) -> SamplingParams:
    return SamplingParams(max_tokens=drawn, temperature=0.0, ignore_eos=True)


def _kinds(drawn: int) -> list[SamplingParams]:
    """Return the kinds of sampling that take kernels of their own."""
    common: dict[str, Any] = {"max_tokens": drawn, "ignore_eos": True}
    return [
        SamplingParams(**common, logprobs=2, prompt_logprobs=1),
        SamplingParams(**common, top_p=0.9, seed=1),
        SamplingParams(**common, top_k=20, min_p=0.05),
        SamplingParams(**common, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(**common, logit_bias={0: -1.0}, min_tokens=2),
    ]


def _request(limits: BatchLimits, number: int, length: int, sampling: SamplingParams) -> GenerateRequest:
    """Return a request whose tokens come from all over the vocabulary, so that no expert is favoured."""
    tokens = [(7919 * number + 104_729 * at) % limits.vocab_size for at in range(length)]
    return GenerateRequest(
        id=f"warm-up-{number}", attempt=1, token_ids=tokens, prompt_len=length, sampling=sampling,
        deadline_ms=NEVER_MS, priority=0, tenant="", reply_to="",
    )  # fmt: skip
