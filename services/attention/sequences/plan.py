"""Messages between the batch manager and the engine: the plan of a step, and its outcomes. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.attention.sequences.sequence import SequenceState
from services.errors import RequestError
from services.messages import PromptScores, TokenLogprob
from services.prefix import PrefixScope


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Bounds of the batch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_cache: bool = True
    prefix_cache_scope: PrefixScope = "tenant"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``start .. start + length`` of a sequence, computed in one step.

    ``draws``: the next token is drawn from the last row. ``scored``: prompt positions whose log-probability is wanted;
    the row of token ``p - 1`` scores position ``p``.
    """

    state: SequenceState
    start: int
    length: int
    draws: bool
    scored: range

    @property
    def end(self) -> int:
        return self.start + self.length

    @classmethod
    def of(cls, state: SequenceState, budget: int, start: int | None = None) -> Piece:
        """Return the next tokens of ``state`` to compute, at most ``budget``; from ``start`` on if those before it are
        in flight."""
        start = state.computed if start is None else start
        length = min(len(state.token_ids) - start, budget)
        scored = range(0)
        if state.scored is not None:
            first = max(start + 1, state.scored)
            scored = range(first, min(start + length + 1, state.request.prompt_len))
        ends = start + length == len(state.token_ids)
        return cls(state=state, start=start, length=length, draws=ends and state.wants_token, scored=scored)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The work of one step, in row order: first ``decodes``, which compute their last token and draw the next one."""

    decodes: tuple[SequenceState, ...] = ()
    prompts: tuple[Piece, ...] = ()

    @property
    def drawing(self) -> list[SequenceState]:
        """The sequences that draw a token, in the order of their rows."""
        return [*self.decodes, *(piece.state for piece in self.prompts if piece.draws)]

    @property
    def states(self) -> list[SequenceState]:
        """All sequences, in the order of their rows."""
        return [*self.decodes, *(piece.state for piece in self.prompts)]

    @property
    def sequences(self) -> int:
        return len(self.decodes) + len(self.prompts)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(piece.length for piece in self.prompts)

    def one_by_one(self) -> Iterator[StepPlan]:
        """Yield a plan for each sequence by itself, in order."""
        yield from (StepPlan(decodes=(state,)) for state in self.decodes)
        yield from (StepPlan(prompts=(piece,)) for piece in self.prompts)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a piece: the drawn token, if it draws, and scores of ``Piece.scored``; or the error."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    scores: PromptScores | None = None
    error: RequestError | None = None


@dataclass(kw_only=True, slots=True)
class BatchCounters:
    """Totals since the start."""

    preemptions: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
