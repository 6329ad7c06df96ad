"""The array of KV blocks: rows follow their sequences, and its width follows the longest of them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from services.attention.sequences.sequence import SequenceState
from services.attention.step.fixed_inputs import FixedDecodes, Shape
from services.attention.step.flatten import BlockTable
from services.model.inputs import DecodeRows, StepInputs


class Held:
    """Of a sequence, its blocks."""

    def __init__(self, *blocks: int) -> None:
        self.blocks = list(blocks)


def rows(table: BlockTable, *states: Held) -> list[list[int]]:
    position_B = np.array([4 * len(state.blocks) - 1 for state in states])
    found = table.rows(cast(list[SequenceState], list(states)), position_B)
    return [row[: len(state.blocks)].tolist() for row, state in zip(found, states, strict=True)]


def test_rows_follow_their_sequences_and_the_width_goes_back() -> None:
    table, short, long = BlockTable(4), Held(7, 3), Held(*range(100, 300))
    assert rows(table, short, long) == [short.blocks, long.blocks]
    assert table._blocks_BM.shape[1] >= 200
    assert rows(table, short) == [short.blocks]
    assert table._blocks_BM.shape[1] < 40, "each step would copy what the long one needed"
    again = Held(*range(50))
    assert rows(table, again, short) == [again.blocks, short.blocks]


def test_a_graphs_inputs_take_the_columns_that_are_read() -> None:
    fixed = FixedDecodes(4, Shape(blocks=8, block_size=4, spare_slot=32), torch.device("cpu"))
    paged: Any = fixed.of(4).paged
    paged.blocks_BM.fill_(99)
    ones_T = torch.ones(2, dtype=torch.int64)
    fixed.fill(
        StepInputs(
            token_ids_T=ones_T, positions_T=torch.tensor([8, 2]), slots_T=ones_T, sequences=(), logits_rows_R=ones_T,
            decodes=DecodeRows(kv_len_B=np.array([9, 3]), blocks_BM=np.arange(60).reshape(2, 30)),
        ),
        4,
    )  # fmt: skip
    assert paged.blocks_BM[:2].tolist() == [[0, 1, 2] + [99] * 5, [30, 31, 32] + [99] * 5]
    assert paged.kv_len_B.tolist() == [9, 3, 0, 0]
