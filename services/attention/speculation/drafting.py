"""Adds chains of drafts to the plan of a step: for which sequences, and how long. Pure Python.

A chain costs rows, which may wake experts that no other row needs; it pays where drafts are accepted. The gate decides
by what was measured how long chains are for so many sequences; each sequence has longer ones while its own drafts are
accepted, and shorter ones after a rejection. Drafts take only what nothing else needs: rows that are left after prompts
and within the most sequences of a step, and blocks that are left when every sequence has one to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.attention.sequences.plan import Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.gate import Gate


class Speculator(Protocol):
    """Guesses what follows. Nothing depends on its guesses but time."""

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow the known ones of ``state``."""
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

    def extend(self, plan: StepPlan, room: int) -> StepPlan:
        """Return ``plan`` with chains instead of some of its decodes; ``room``: how many more rows it may have."""
        plan = self._extended(plan, room)
        self._waited, self._awaited = plan if self._awaited else None, False
        return plan

    def _extended(self, plan: StepPlan, room: int) -> StepPlan:
        depth = self._depth(len(plan.decodes), prompts=bool(plan.prompts))
        if not depth or room <= 0:
            return plan
        decodes, chains = list[SequenceState](), list[Piece]()
        for state in plan.decodes:
            drafts = self._drafts(state, min(depth, room), spare_blocks=len(plan.decodes))
            if drafts:
                chains.append(Piece.chain(state, drafts))
                room -= len(drafts)
            else:
                decodes.append(state)
        return StepPlan(decodes=tuple(decodes), chains=tuple(chains), prompts=plan.prompts) if chains else plan

    def expects(self, plan: StepPlan, room: int) -> bool:
        """Return whether the tokens of ``plan`` have to be known before the next step is planned: it has drafts, or the
        next one may have some, in ``room`` rows."""
        states = [state for state in plan.drawing if state.blocks]  # the others have ended since it was launched
        self._awaited = bool(plan.chains)
        if not self._awaited and room > 0 and self._depth(len(states), prompts=bool(plan.prompts)):
            self._awaited = any(_may(state) and self._speculator.drafts(state, 1) for state in states)
        return self._awaited

    def note(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Learn from a step that has been read."""
        first = len(plan.decodes)
        for chain, outcome in zip(plan.chains, outcomes[first:], strict=False):
            self._trusted[chain.state] = _trust(len(chain.drafts), len(outcome.further))
        affected = bool(plan.chains) or plan is self._waited
        if plan.prompts or any(outcome.error for outcome in outcomes):
            return
        if affected or not self._gate.depth(len(outcomes)):  # other steps are as they would be without drafts
            self._gate.note(len(outcomes), sum(1 + len(outcome.further) for outcome in outcomes), seconds)

    def forget(self, state: SequenceState) -> None:
        """Drop what is kept for ``state``, which has ended or waits again."""
        self._trusted.pop(state, None)
        self._speculator.forget(state)

    def _depth(self, sequences: int, *, prompts: bool) -> int:
        """Return how long chains may be; beside ``prompts``, whose steps the gate does not learn from."""
        if not sequences:
            return 0
        return self._gate.known_depth(sequences) if prompts else self._gate.depth(sequences)

    def _drafts(self, state: SequenceState, most: int, *, spare_blocks: int) -> Sequence[int]:
        """Return drafts for ``state``, which has blocks for them, and left ``spare_blocks`` if it had to take some."""
        known, blocks = len(state.token_ids), self._blocks
        most = min(most, state.limit - known - 1, self._trusted.get(state, most))
        if most <= 0 or not _may(state):
            return ()
        drafts = self._speculator.drafts(state, most)
        lacking = blocks.blocks_for(known + len(drafts)) - len(state.blocks)
        if lacking > 0 and blocks.available - lacking >= spare_blocks:
            state.blocks += blocks.take((), lacking)
        return drafts[: len(state.blocks) * blocks.block_size - known]


def _may(state: SequenceState) -> bool:
    return state.request.sampling.speculation != "off"


def _trust(drafted: int, accepted: int) -> int:
    return 2 * drafted if accepted == drafted else 1 + accepted
