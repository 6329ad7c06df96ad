"""A step's inputs to those of its micro-batches: cut between two sequences, so that each holds its sequences whole.

Legend: T rows of the step, R rows whose logits are wanted.
"""

from __future__ import annotations

from msgspec import structs

from services.model.inputs import DecodeRows, SequenceRows, StepInputs


def split(inputs: StepInputs, at: int | None) -> tuple[StepInputs, ...]:
    """Before the sequence ``at`` of ``inputs.sizes``, in two; ``inputs`` itself for None.

    Row numbers count within each. Neither wants logits: these are of the rows of all, joined again.
    """
    if at is None:
        return (inputs,)
    decodes = inputs.decodes
    if decodes is not None and at <= len(decodes):
        first = _part(inputs, slice(at), _cut(decodes, slice(at)), ())
        return first, _part(inputs, slice(at, None), _cut(decodes, slice(at, None)), inputs.sequences)
    number = at - (len(decodes) if decodes is not None else 0)
    row = inputs.sequences[number].start
    first = _part(inputs, slice(row), decodes, inputs.sequences[:number])
    return first, _part(inputs, slice(row, None), None, inputs.sequences[number:])


def _cut(decodes: DecodeRows, rows: slice) -> DecodeRows | None:
    kv_len_B = decodes.kv_len_B[rows]
    return DecodeRows(kv_len_B=kv_len_B, blocks_BM=decodes.blocks_BM[rows]) if len(kv_len_B) else None


def _part(
    inputs: StepInputs, rows: slice, decodes: DecodeRows | None, sequences: tuple[SequenceRows, ...]
) -> StepInputs:
    first_row = rows.start or 0
    return StepInputs(
        token_ids_T=inputs.token_ids_T[rows],
        positions_T=inputs.positions_T[rows],
        slots_T=inputs.slots_T[rows],
        sequences=tuple(structs.replace(one, start=one.start - first_row) for one in sequences),
        logits_rows_R=inputs.logits_rows_R[:0],
        decodes=decodes,
    )
