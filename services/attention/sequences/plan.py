"""Messages between the batch manager and the engine: the plan of a step, and its outcomes. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from services.attention.sequences.sequence import DrawRow, SequenceState
from services.attention.sequences.tree import TokenTree
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
    the row of token ``p - 1`` scores position ``p``. ``drafts``: a chain of guesses that follow the known tokens, with
    a row each; every row of a chain draws, and the last known token's is its first. ``tree``: the drafts branch; then
    ``start + i`` is the place of row i in the sequence's blocks, and its position is that of its depth.
    """

    state: SequenceState
    start: int
    length: int
    draws: bool
    scored: range
    drafts: tuple[int, ...] = ()
    tree: TokenTree | None = None

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

    @classmethod
    def chain(cls, state: SequenceState, drafts: Sequence[int]) -> Piece:
        """Return the last token of ``state``, which decodes, and ``drafts`` after it."""
        length = 1 + len(drafts)
        return cls(state=state, start=state.computed, length=length, draws=True, scored=range(0), drafts=tuple(drafts))

    @classmethod
    def of_tree(cls, state: SequenceState, tree: TokenTree) -> Piece:
        """Return the last token of ``state``, which decodes, and the nodes of ``tree`` after it."""
        chain = cls.chain(state, tree.tokens)
        return msgspec.structs.replace(chain, tree=tree) if tree.branches else chain

    @property
    def depth(self) -> int:
        """The longest way through the drafts."""
        return len(self.drafts) if self.tree is None else max(self.tree.depths())

    @property
    def rows(self) -> Iterator[DrawRow]:
        """The rows from which tokens are drawn, in order: those of the last known token and of each draft."""
        if self.tree is not None:
            return (self.state.row.after(depth, number) for depth, number in self.tree.levels())
        return (self.state.row.after(drafts) for drafts in range(1 + len(self.drafts) if self.draws else 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The work of one step, in row order: first ``decodes``, which compute their last token and draw the next one, then
    ``chains``, which compute drafts as well and draw after each, then pieces of ``prompts``."""

    decodes: tuple[SequenceState, ...] = ()
    prompts: tuple[Piece, ...] = ()
    chains: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What may have several rows, in their order."""
        return self.chains + self.prompts

    @property
    def drawing(self) -> list[SequenceState]:
        """The sequence of each draw, in the order of the rows."""
        return [*self.decodes, *(piece.state for piece in self.pieces for _ in piece.rows)]

    @property
    def rows(self) -> list[DrawRow]:
        """Each draw as the sampler sees it, in the order of the rows."""
        return [state.row for state in self.decodes] + [row for piece in self.pieces for row in piece.rows]

    @property
    def states(self) -> list[SequenceState]:
        """All sequences, in the order of their rows."""
        return [*self.decodes, *(piece.state for piece in self.pieces)]

    @property
    def sequences(self) -> int:
        return len(self.decodes) + len(self.chains) + len(self.prompts)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(piece.length for piece in self.pieces)

    def one_by_one(self) -> Iterator[StepPlan]:
        """Yield a plan for each sequence by itself, in order, without drafts: one of them may be why a step failed."""
        yield from (StepPlan(decodes=(state,)) for state in self.decodes)
        yield from (StepPlan(decodes=(chain.state,)) for chain in self.chains)
        yield from (StepPlan(prompts=(piece,)) for piece in self.prompts)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a piece: the drawn token, if it draws, and scores of ``Piece.scored``; or the error. ``further``: what
    was drawn after each accepted draft, in order; ``accepted``: the rows of those drafts."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    scores: PromptScores | None = None
    error: RequestError | None = None
    further: tuple[Outcome, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def verified(cls, drawn: Sequence[Outcome], drafts: Sequence[int], tree: TokenTree | None = None) -> Outcome:
        """Return the result of a chain, or of a ``tree`` of ``drafts``, by what each of its rows drew. A draft is
        accepted if it is what the row before it drew, and so are all before it; rows after any other one have seen a
        token that is not there."""
        tree = tree or TokenTree(tuple(drafts), tuple(range(len(drafts))))
        path = tuple(tree.walk([each.token_id for each in drawn]))
        further = tuple(drawn[row] for row in path)
        return msgspec.structs.replace(drawn[0], further=further, accepted=path) if path else drawn[0]


@dataclass(kw_only=True, slots=True)
class BatchCounters:
    """Totals since the start."""

    preemptions: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    chains: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
