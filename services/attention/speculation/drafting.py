"""Adds chains and trees of drafts to the plan of a step: for which sequences, and how many. Pure Python.

Drafts cost rows, which may wake experts that no other row needs; they pay where they are accepted. The gate decides by
what was measured how long chains are for so many sequences, and how many make a tree; each sequence has longer ones
while its own drafts are accepted, and shorter ones after a rejection. Drafts take only what nothing else needs: rows
that are left after prompts and within the most sequences of a step, and blocks that are left when every sequence has
one to grow. The blocks that a tree needs beyond what was accepted go back at the end of its step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from services.attention.sequences.plan import Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.sequences.tree import MAX_NODES, TokenTree
from services.attention.speculation.gate import NONE, Amount, Gate
from services.attention.speculation.speculator import Chains, Speculator, Wanted
from services.attention.speculation.woken import WokenExperts

KEPT_STEPS = 1024
"""Of how many steps times are kept for whoever takes them."""


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
    """Drafts of one engine's sequences by ``speculator``, in the amount that ``gate`` allows. ``woken`` counts experts
    in a sample of the steps; None where nobody can."""

    def __init__(
        self,
        speculator: Speculator,
        gate: Gate,
        blocks: Blocks,
        *,
        woken: WokenExperts | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._speculator, self._gate, self._blocks = speculator, gate, blocks
        self._woken, self._timer = woken, timer
        self._trusted: dict[SequenceState, int] = {}
        """How long the next chain of a sequence may be, where that is known."""
        self._awaited = False
        """Whether the next step waits for tokens, since it may have drafts."""
        self._waited: StepPlan | None = None
        """The plan of the last step that did."""
        self._lent: list[SequenceState] = []
        """Sequences with blocks for a tree of the step that is planned or in flight."""
        self._drafted_s = self._owed_s = 0.0
        """Seconds of drafting for the step in progress; those for prompts that no step has counted yet."""
        self.draftings: deque[float] = deque(maxlen=KEPT_STEPS)
        self.verifications: deque[float] = deque(maxlen=KEPT_STEPS)
        """Seconds of steps with drafts: in which these were made, and in which they were verified."""

    def extend(self, plan: StepPlan, room: int) -> StepPlan:
        """Return ``plan`` with chains instead of some of its decodes; ``room``: how many more rows it may have."""
        self._drafted_s = 0.0  # of a step that failed, and was not noted
        plan = self._extended(plan, room)
        self._waited, self._awaited = plan if self._awaited else None, False
        if self._woken is not None:
            self._woken.watch(plan)
        return plan

    def _extended(self, plan: StepPlan, room: int) -> StepPlan:
        held = {state: len(state.blocks) for state in plan.decodes} if room > 0 else {}
        wanted = self._wanted(plan, room)
        prompts = self._followed(plan)
        if not wanted and not prompts:
            return plan
        began = self._timer()
        drafted = self._speculator.draft(wanted, prompts)
        self._drafted_s = self._timer() - began
        room -= sum(one.most for one in wanted)
        chains = dict[SequenceState, Piece]()
        for one, said in zip(wanted, drafted, strict=True):
            tree = self._tree(one, said, room, held=held[one.state], spare_blocks=len(plan.decodes))
            room += one.most - len(tree.tokens)
            if tree.tokens:
                chains[one.state] = Piece.of_tree(one.state, tree)
        if not chains:
            return plan
        self.draftings.append(self._drafted_s)
        decodes = tuple(state for state in plan.decodes if state not in chains)
        return StepPlan(decodes=decodes, chains=tuple(chains.values()), prompts=plan.prompts)

    def give_back(self) -> None:
        """Take back the blocks that trees of the step had besides those of known tokens, before any other is planned:
        they cost nobody a block."""
        for state in self._lent:
            self._speculator.settle(state)
            self._cut(state, self._blocks.blocks_for(len(state.token_ids)))
        self._lent.clear()

    def expects(self, plan: StepPlan, room: int) -> bool:
        """Return whether the tokens of ``plan`` have to be known before the next step is planned: it has drafts, or the
        next one may have some, in ``room`` rows."""
        states = [state for state in plan.drawing if state.blocks]  # the others have ended since it was launched
        self._awaited = bool(plan.chains)
        if not self._awaited and room > 0 and self._amount(len(states), prompts=bool(plan.prompts)) != NONE:
            self._awaited = any(_asks(state) and self._speculator.may(state) for state in states)
        return self._awaited

    def note(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Learn from a step that has been read. ``seconds`` are also those of drafting for it."""
        drafted_s, self._drafted_s = self._drafted_s, 0.0
        if self._woken is not None:
            self._woken.count()
        first = len(plan.decodes)
        for chain, outcome in zip(plan.chains, outcomes[first:], strict=False):
            self._trusted[chain.state] = _trust(chain.depth, len(outcome.further))
        if plan.chains:
            self.verifications.append(max(0.0, seconds - drafted_s))
        if plan.prompts or any(outcome.error for outcome in outcomes):
            self._owed_s += drafted_s * _for_prompts(plan)
        elif drafted_s and self._speculator.late:
            self._gate.charge(len(outcomes), drafted_s)
        elif plan.chains or plan is self._waited or self._gate.amount(len(outcomes)) == NONE:
            # other steps are as they would be without drafts
            tokens = sum(1 + len(outcome.further) for outcome in outcomes)
            self._gate.note(len(outcomes), tokens, seconds + self._paid_s(plan, seconds))

    def forget(self, state: SequenceState) -> None:
        """Drop what is kept for ``state``, which has ended or waits again."""
        self._trusted.pop(state, None)
        self._speculator.forget(state)

    def _paid_s(self, plan: StepPlan, seconds: float) -> float:
        """Return how long drafting took for prompts, in parts: steps that it has helped pay for it."""
        paid = min(self._owed_s, seconds) if plan.chains else 0.0
        self._owed_s -= paid
        return paid

    def _followed(self, plan: StepPlan) -> list[Piece]:
        """Return the pieces of prompts whose sequences will probably have drafts."""
        asking = [piece for piece in plan.prompts if _asks(piece.state)]
        return asking if asking and self._gate.likely(len(plan.decodes) + len(plan.prompts)) else []

    def _amount(self, sequences: int, *, prompts: bool) -> Amount:
        """Return how many drafts each may have; beside ``prompts``, whose steps the gate does not learn from."""
        if not sequences:
            return NONE
        return self._gate.known_amount(sequences) if prompts else self._gate.amount(sequences)

    def _wanted(self, plan: StepPlan, room: int) -> list[Wanted]:
        """Return what is asked of the speculator: a chain of each fits into ``room``, branches may not."""
        amount, wanted = self._amount(len(plan.decodes), prompts=bool(plan.prompts)), list[Wanted]()
        for state in plan.decodes if amount != NONE else ():
            if room <= 0:
                break
            most = self._most(state, min(amount.depth, room), spare_blocks=len(plan.decodes))
            if most > 0:
                wanted.append(Wanted(state, most, amount.branches))
                room -= most
        return wanted

    def _most(self, state: SequenceState, most: int, *, spare_blocks: int) -> int:
        """Return how long a chain of ``state`` may be. It has blocks for that."""
        most = min(most, state.limit - len(state.token_ids) - 1, self._trusted.get(state, most))
        if most <= 0 or not _asks(state) or not self._speculator.may(state):
            return 0
        return min(most, self._places(state, most, spare_blocks))

    def _tree(self, one: Wanted, chains: Chains, room: int, *, held: int, spare_blocks: int) -> TokenTree:
        """Return ``chains`` as a tree, for whose branches there is ``room``. ``held``: how many blocks the sequence had
        before any were taken for drafts; those that it does not need besides are given back."""
        state = one.state
        known = len(state.token_ids)
        left = min(one.most + room, state.limit - known - 1, MAX_NODES)
        tree = TokenTree.of(chains, left)
        places = self._places(state, len(tree.tokens), spare_blocks)
        if len(tree.tokens) > places:
            tree = TokenTree.of(chains, places)
        longest = max(map(len, chains), default=0)  # whoever drafted it may have computed it in these blocks
        self._cut(state, max(held, self._blocks.blocks_for(known + max(longest, len(tree.tokens)))))
        if tree.branches:
            self._lent.append(state)
        return tree

    def _places(self, state: SequenceState, drafts: int, spare_blocks: int) -> int:
        """Return how many drafts the blocks of ``state`` have places for, with as many more blocks as ``drafts`` need
        if these leave ``spare_blocks``."""
        known, blocks = len(state.token_ids), self._blocks
        lacking = blocks.blocks_for(known + drafts) - len(state.blocks)
        if lacking > 0 and blocks.available - lacking >= spare_blocks:
            state.blocks += blocks.take((), lacking)
        return len(state.blocks) * blocks.block_size - known

    def _cut(self, state: SequenceState, keep: int) -> None:
        """Leave ``state`` the first ``keep`` of its blocks."""
        if keep < len(state.blocks):
            self._blocks.release(state.blocks[keep:])
            state.blocks = state.blocks[:keep]  # another list: what is kept of this one knows only that it grows


def _asks(state: SequenceState) -> bool:
    return state.request.sampling.speculation != "off"


def _for_prompts(plan: StepPlan) -> float:
    """Return the part of a step's drafting that was for its prompts, by rows."""
    prompts, drafts = sum(piece.length for piece in plan.prompts), sum(len(chain.drafts) for chain in plan.chains)
    return prompts / (prompts + drafts) if prompts else 0.0


def _trust(drafted: int, accepted: int) -> int:
    return 2 * drafted if accepted == drafted else 1 + accepted
