"""A step's inputs to those of its micro-batches: cut between two sequences, so that each holds its sequences whole.

Legend: T rows of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import replace

from services.model.inputs import StepInputs


def split(inputs: StepInputs, at: int | None) -> tuple[StepInputs, ...]:
    """Before the sequence ``at``, in two; ``inputs`` itself for None.

    Row numbers count within each. Neither wants logits: these are of the rows of all, joined again.
    """
    if at is None:
        return (inputs,)
    row = inputs.sequences[at].start
    first = _part(inputs, slice(row), range(at))
    return first, _part(inputs, slice(row, None), range(at, len(inputs.sequences)))


def _part(inputs: StepInputs, rows: slice, sequences: range) -> StepInputs:
    first_row = rows.start or 0
    return StepInputs(
        token_ids_T=inputs.token_ids_T[rows],
        positions_T=inputs.positions_T[rows],
        slots_T=inputs.slots_T[rows],
        sequences=tuple(
            replace(inputs.sequences[number], start=inputs.sequences[number].start - first_row) for number in sequences
        ),
        logits_rows_R=inputs.logits_rows_R[:0],
    )
