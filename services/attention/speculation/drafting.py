"""Adds chains and trees of drafts to the plan of a step: for which sequences, and how many. Pure Python.

Drafts cost rows, which may wake experts that no other row needs; they pay where they are accepted. The gate decides by
what was measured how long chains are for so many sequences, and how many make a tree; each sequence has longer ones
while its own drafts are accepted, and shorter ones after a rejection. Drafts take only what nothing else needs: rows
that are left after prompts and within the most sequences of a step, and blocks that are left when every sequence has
one to grow. The blocks that a tree needs beyond what was accepted go back at the end of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.attention.sequences.plan import Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.sequences.tree import MAX_NODES, TokenTree
from services.attention.speculation.gate import NONE, Amount, Gate


class Speculator(Protocol):
    """Guesses what follows. Nothing depends on its guesses but time."""

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow the known ones of ``state``."""
        ...

    def chains(self, state: SequenceState, most: int, count: int) -> Sequence[Sequence[int]]:
        """Return at most ``count`` chains of such tokens that differ, the likeliest first."""
        ...

    def forget(self, state: SequenceState) -> None:
        """Drop what is kept for ``state``, which has ended or waits again."""
        ...


class Blocks(Protocol):
    """The pool of KV blocks."""

    @property
    def available(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def blocks_for(self, tokens: int) -> int: ...
    def take(self, matched: Sequence[int], new: int) -> list[int]: ...
    def release(self, blocks: Sequence[int]) -> None: ...


class Drafting:
    """Drafts of one engine's sequences by ``speculator``, in the amount that ``gate`` allows."""

    def __init__(self, speculator: Speculator, gate: Gate, blocks: Blocks) -> None:
        self._speculator, self._gate, self._blocks = speculator, gate, blocks
        self._trusted: dict[SequenceState, int] = {}
        """How long the next chain of a sequence may be, where that is known."""
        self._awaited = False
        """Whether the next step waits for tokens, since it may have drafts."""
        self._waited: StepPlan | None = None
        """The plan of the last step that did."""
        self._lent: list[SequenceState] = []
        """Sequences with blocks for a tree of the step that is planned or in flight."""

    def extend(self, plan: StepPlan, room: int) -> StepPlan:
        """Return ``plan`` with chains instead of some of its decodes; ``room``: how many more rows it may have."""
        plan = self._extended(plan, room)
        self._waited, self._awaited = plan if self._awaited else None, False
        return plan

    def _extended(self, plan: StepPlan, room: int) -> StepPlan:
        amount = self._amount(len(plan.decodes), prompts=bool(plan.prompts))
        if amount == NONE or room <= 0:
            return plan
        decodes, chains = list[SequenceState](), list[Piece]()
        for state in plan.decodes:
            tree = self._tree(state, amount, room, spare_blocks=len(plan.decodes))
            if tree.tokens:
                chains.append(Piece.of_tree(state, tree))
                room -= len(tree.tokens)
            else:
                decodes.append(state)
        return StepPlan(decodes=tuple(decodes), chains=tuple(chains), prompts=plan.prompts) if chains else plan

    def give_back(self) -> None:
        """Take back the blocks that trees of the step had besides those of known tokens, before any other is planned:
        they cost nobody a block."""
        for state in self._lent:
            needed = self._blocks.blocks_for(len(state.token_ids))
            if len(state.blocks) > needed:
                self._blocks.release(state.blocks[needed:])
                state.blocks = state.blocks[:needed]  # another list: what is kept of this one names too many
        self._lent.clear()

    def expects(self, plan: StepPlan, room: int) -> bool:
        """Return whether the tokens of ``plan`` have to be known before the next step is planned: it has drafts, or the
        next one may have some, in ``room`` rows."""
        states = [state for state in plan.drawing if state.blocks]  # the others have ended since it was launched
        self._awaited = bool(plan.chains)
        if not self._awaited and room > 0 and self._amount(len(states), prompts=bool(plan.prompts)) != NONE:
            self._awaited = any(_may(state) and self._speculator.drafts(state, 1) for state in states)
        return self._awaited

    def note(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Learn from a step that has been read."""
        first = len(plan.decodes)
        for chain, outcome in zip(plan.chains, outcomes[first:], strict=False):
            self._trusted[chain.state] = _trust(chain.depth, len(outcome.further))
        affected = bool(plan.chains) or plan is self._waited
        if plan.prompts or any(outcome.error for outcome in outcomes):
            return
        if affected or self._gate.amount(len(outcomes)) == NONE:  # other steps are as they would be without drafts
            self._gate.note(len(outcomes), sum(1 + len(outcome.further) for outcome in outcomes), seconds)

    def forget(self, state: SequenceState) -> None:
        """Drop what is kept for ``state``, which has ended or waits again."""
        self._trusted.pop(state, None)
        self._speculator.forget(state)

    def _amount(self, sequences: int, *, prompts: bool) -> Amount:
        """Return how many drafts each may have; beside ``prompts``, whose steps the gate does not learn from."""
        if not sequences:
            return NONE
        return self._gate.known_amount(sequences) if prompts else self._gate.amount(sequences)

    def _tree(self, state: SequenceState, amount: Amount, room: int, *, spare_blocks: int) -> TokenTree:
        """Return drafts for ``state``, which has blocks for them, and left ``spare_blocks`` if it had to take some."""
        known, blocks = len(state.token_ids), self._blocks
        left = min(room, state.limit - known - 1, MAX_NODES)
        most = min(left, amount.depth, self._trusted.get(state, left))
        if most <= 0 or not _may(state):
            return TokenTree()
        drafter, several = self._speculator, amount.branches > 1
        chains = drafter.chains(state, most, amount.branches) if several else [drafter.drafts(state, most)]
        tree = TokenTree.of(chains, left)
        lacking = blocks.blocks_for(known + len(tree.tokens)) - len(state.blocks)
        if lacking > 0 and blocks.available - lacking >= spare_blocks:
            state.blocks += blocks.take((), lacking)
            if tree.branches:
                self._lent.append(state)
        places = len(state.blocks) * blocks.block_size - known
        return tree if len(tree.tokens) <= places else TokenTree.of(chains, places)


def _may(state: SequenceState) -> bool:
    return state.request.sampling.speculation != "off"


def _trust(drafted: int, accepted: int) -> int:
    return 2 * drafted if accepted == drafted else 1 + accepted
