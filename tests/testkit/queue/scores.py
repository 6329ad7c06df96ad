"""Scores of a prompt: as events bring them to gateways of this release and of the one before."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from services.messages import PromptScores, TokenEvent, TokenLogprob


def packed(start: int, scores: Sequence[TokenLogprob], width: int = 0) -> PromptScores:
    """``scores`` of the prompt from ``start`` on, each with ``width`` alternatives."""
    tops = [entry for score in scores for entry in score.top]
    assert len(tops) == width * len(scores)
    return PromptScores(
        start=start,
        width=width,
        logprobs=struct.pack(f"<{len(scores)}f", *(score.logprob for score in scores)),
        top_ids=struct.pack(f"<{len(tops)}i", *(token_id for token_id, _ in tops)),
        top_logprobs=struct.pack(f"<{len(tops)}f", *(logprob for _, logprob in tops)),
    )


def prompt_scores(events: Iterable[TokenEvent]) -> list[TokenLogprob | None]:
    """Of the prompt of one request, whose events these are; whatever way they came, they come in order and once."""
    found: list[TokenLogprob | None] = [None]
    for event in events:
        if event.prompt_logprobs is not None:
            assert found == [None]
            found = event.prompt_logprobs
        if event.scores is not None:
            assert event.scores.start == len(found)
            assert (event.token_id, event.finish, event.index) == (None, None, 0)
            found += event.scores.each()
    return found
