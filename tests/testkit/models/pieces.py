"""The pieces of a step plan, those of its decodes included."""

from __future__ import annotations

from services.attention.sequences.plan import Piece, StepPlan


def pieces(plan: StepPlan) -> tuple[Piece, ...]:
    """Pieces in row order. ``plan`` must not be completed yet."""
    decodes = (
        Piece(state=state, start=state.computed, length=1, draws=True, scored=range(0)) for state in plan.decodes
    )
    return (*decodes, *plan.prompts)
