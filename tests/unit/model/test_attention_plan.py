"""Index tensors and masks of a step, against who-sees-whom written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.model.inputs import DecodeRows, SequenceRows, StepInputs
from services.model.length_groups import group_by_length
from services.model.paged_attention import WindowPlan, WindowPlanner

CPU = torch.device("cpu")
NOTHING = torch.zeros(0, dtype=torch.int64)


@given(st.lists(st.integers(1, 200), max_size=40), st.floats(0, 500))
def test_groups_hold_every_index_once_and_waste_little(lengths: list[int], call_cost: float) -> None:
    groups = [group_G.tolist() for group_G in group_by_length(np.array(lengths, dtype=np.int64), call_cost)]
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        for bound in {lengths[index] for index in group}:
            below = sum(lengths[index] <= bound for index in group)
            assert (longest - bound) * below <= call_cost, "one more cut would have paid"


def test_equal_lengths_stay_together() -> None:
    (group_G,) = group_by_length(np.full(50, 7), 0)
    assert group_G.tolist() == list(range(50))


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepInputs, list[SequenceRows], int]:
    """A step of sequences at any place of their life, with block ids that differ everywhere; some come as arrays."""
    block_size = draw(st.integers(1, 5))
    sequences, start, block = [], 0, 0
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=1, max_size=6))
    as_arrays = draw(st.integers(0, lengths.count(1)))
    for length in sorted(lengths, key=lambda length: length > 1) if as_arrays else lengths:
        kv_len = length + draw(st.integers(0, 30))
        count = -(-kv_len // block_size) + draw(st.integers(0, 2))
        sequences.append(SequenceRows(start=start, length=length, kv_len=kv_len, blocks=range(block, block + count)))
        start, block = start + length, block + count
    inputs = StepInputs(
        token_ids_T=NOTHING,
        positions_T=NOTHING,
        slots_T=NOTHING,
        sequences=tuple(sequences[as_arrays:]),
        logits_rows_R=NOTHING,
        decodes=arrays(sequences[:as_arrays], block_size) if as_arrays else None,
    )
    return inputs, sequences, block_size


def arrays(sequences: list[SequenceRows], block_size: int) -> DecodeRows:
    held = [list(rows.blocks[: -(-rows.kv_len // block_size)]) for rows in sequences]
    width = max(map(len, held)) + 1
    return DecodeRows(
        kv_len_B=np.array([rows.kv_len for rows in sequences]),
        blocks_BM=np.array([blocks + blocks[-1:] * (width - len(blocks)) for blocks in held]),
    )


def seen_by_row(plan: WindowPlan, block_size: int) -> dict[int, list[int]]:
    """Row of the step -> cache slots it sees; a row that sees the step's own rows sees them as ``-1 - row``."""
    seen = {}
    for group in plan.decode:
        rows = group.rows_B.tolist() if group.rows_B is not None else range(len(group.blocks_BM))
        for row, blocks, mask_L in zip(rows, group.blocks_BM, group.mask_B11L[:, 0, 0], strict=True):
            slots_L = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
            seen[row] = slots_L[mask_L == 0].tolist()
    for piece in plan.prompts:
        if piece.blocks_M is None:
            slots_L = -1 - torch.arange(piece.start, piece.start + piece.length)
        else:
            slots_L = (piece.blocks_M[:, None] * block_size + torch.arange(block_size)).flatten()
        for offset in range(piece.length):
            visible_L = torch.arange(len(slots_L)) <= offset if piece.mask_WL is None else piece.mask_WL[offset] == 0
            seen[piece.start + offset] = slots_L[visible_L].tolist()
    return seen


@given(steps(), st.one_of(st.none(), st.integers(1, 12)), st.sampled_from([1, 64, 10**6]))
def test_every_row_sees_its_past_and_nothing_else(
    step: tuple[StepInputs, list[SequenceRows], int], window: int | None, kv_size: int
) -> None:
    inputs, sequences, block_size = step
    planner = WindowPlanner(block_size=block_size, kv_size=kv_size, mask_dtype=torch.float32, device=CPU)
    seen = seen_by_row(planner.plan(inputs, window), block_size)
    for rows in sequences:
        for offset in range(rows.length):
            position = rows.kv_len - rows.length + offset
            oldest = 0 if window is None else max(0, position - window + 1)
            expected = [rows.blocks[p // block_size] * block_size + p % block_size for p in range(oldest, position + 1)]
            own_rows = rows.length > 1 and rows.kv_len == rows.length
            if own_rows:
                expected = [-1 - (rows.start + p) for p in range(oldest, position + 1)]
            assert seen.pop(rows.start + offset) == expected
    assert not seen


@pytest.mark.parametrize("kv_len", [100, 101])
def test_window_reads_only_blocks_in_sight(kv_len: int) -> None:
    rows = SequenceRows(start=0, length=1, kv_len=kv_len, blocks=range(40))
    inputs = StepInputs(
        token_ids_T=NOTHING, positions_T=NOTHING, slots_T=NOTHING, sequences=(rows,), logits_rows_R=NOTHING
    )
    planner = WindowPlanner(block_size=4, kv_size=8, mask_dtype=torch.float32, device=CPU)
    (group,) = planner.plan(inputs, window=8).decode
    assert group.blocks_BM.tolist() == [[23, 24]] if kv_len == 100 else [[23, 24, 25]]
