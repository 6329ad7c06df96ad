"""Attention by work lists: rows come out as by torch's way over gathered keys, whatever the step has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from testkit.gpu.decode_bench import qwen3_30b
from testkit.models.attention_steps import random_parents, tree_rows

from moe_kernels.paged_attention.planner import HEADER, ITEM
from services.model.inputs import DecodeRows, PagedPieces, PagedRows, SequenceRows, StepInputs
from services.model.paged_attention import WindowPlanner, attend
from services.model.spec import LayerSpec
from services.model.work_lists import SPLIT, WorkLists

CPU = torch.device("cpu")
BLOCK = 4
WINDOWS = (None, 3)


SPEC = replace(
    qwen3_30b(2), num_heads=4, num_kv_heads=2, head_dim=16,
    layers=tuple(LayerSpec(kind="moe", window=window) for window in WINDOWS),
)  # fmt: skip


def step(decodes: list[int], pieces: list[tuple[int, int]]) -> StepInputs:
    """``decodes``: lengths; ``pieces``: rows and length. Blocks are all different, and not in order."""
    lengths = [*decodes, *(length for _, length in pieces)]
    blocks, first = [], 0
    for length in lengths:
        count = -(-length // BLOCK)
        blocks.append(list(range(first, first + count))[::-1])
        first += count
    slots, positions = list[int](), list[int]()
    for held, length, rows in zip(blocks, lengths, [*(1 for _ in decodes), *(rows for rows, _ in pieces)], strict=True):
        for position in range(length - rows, length):
            positions.append(position)
            slots.append(held[position // BLOCK] * BLOCK + position % BLOCK)
    sequences, start = [], len(decodes)
    for (rows, length), held in zip(pieces, blocks[len(decodes) :], strict=True):
        sequences.append(SequenceRows(start=start, length=rows, kv_len=length, blocks=[*held, 0]))
        start += rows
    width = max((len(held) for held in blocks[: len(decodes)]), default=0)
    table = np.array([held + held[-1:] * (width - len(held)) for held in blocks[: len(decodes)]], dtype=np.int64)
    return StepInputs(
        token_ids_T=torch.zeros(start, dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        sequences=tuple(sequences),
        logits_rows_R=torch.zeros(0, dtype=torch.int64),
        decodes=DecodeRows(kv_len_B=np.array(decodes), blocks_BM=table) if decodes else None,
    )


def attended(inputs: StepInputs, window: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows, blocks = len(inputs.slots_T), 200
    shape = (blocks, BLOCK, SPEC.num_kv_heads, SPEC.head_dim)
    cache = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    q_TNH = torch.randn(rows, SPEC.num_heads, SPEC.head_dim, generator=generator)
    own = tuple(torch.randn(rows, SPEC.num_kv_heads, SPEC.head_dim, generator=generator) for _ in "kv")
    for part_NBJH, own_TJH in zip(cache, own, strict=True):
        part_NBJH.flatten(0, 1)[inputs.slots_T] = own_TJH
    planner = WindowPlanner(block_size=BLOCK, kv_size=SPEC.kv_size, mask_dtype=torch.float32, device=CPU)
    return attend(planner.plan(inputs, window), q_TNH, (own[0], own[1]), cache)


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 40), max_size=5),
    pieces=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=4),
)
def test_rows_come_out_as_by_torch(window: int | None, decodes: list[int], pieces: list[tuple[int, int]]) -> None:
    if not decodes and not pieces:
        return
    inputs = step(decodes, [(rows, rows + past) for rows, past in pieces])
    paged = WorkLists(SPEC, dtype=torch.float32, device=CPU).of(inputs, BLOCK)
    assert isinstance(paged, PagedPieces if pieces else PagedRows), (
        "decodes alone take the kernel that is made for them"
    )
    by_list = replace(inputs, paged=paged, sequences=(), decodes=None)
    torch.testing.assert_close(attended(by_list, window), attended(inputs, window), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 40), max_size=3),
    pieces=st.lists(st.tuples(st.integers(2, 65), st.integers(1, 30)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_rows_that_branch_come_out_as_by_torch(
    window: int | None, decodes: list[int], pieces: list[tuple[int, int]], seed: int
) -> None:
    inputs = step(decodes, [(rows, rows + past) for rows, past in pieces])
    trees = [tree_rows(random_parents(rows, seed + at)) if at % 3 != 1 else None for at, (rows, _) in enumerate(pieces)]
    sequences = (structs.replace(one, tree=tree) for one, tree in zip(inputs.sequences, trees, strict=True))
    inputs = replace(inputs, sequences=tuple(sequences))
    paged = WorkLists(SPEC, dtype=torch.float32, device=CPU).of(inputs, BLOCK)
    by_list = replace(inputs, paged=paged, sequences=(), decodes=None)
    torch.testing.assert_close(attended(by_list, window), attended(inputs, window), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_in_uniform_lists_a_row_meets_the_same_parts_alone_and_in_a_chunk(window: int | None) -> None:
    """In tiles of one kind, from positions that do not depend on the chunk or on other sequences."""
    lists = WorkLists(SPEC, dtype=torch.float32, device=CPU, uniform=True)
    length = 2 * SPLIT + 77

    def parts(rows: list[int], kv_len: list[int], of: int) -> set[tuple[int, ...]]:
        """Where the parts that the last row of sequence ``of`` is in begin and end, that it sees anything of."""
        planner = lists.planners(rows=sum(rows), sequences=len(rows), positions=length, trees=False)[window]
        words_W = planner.plan(rows, kv_len)
        items = words_W[HEADER : HEADER + ITEM * words_W[0]].reshape(-1, ITEM).tolist()
        last, position = sum(rows[: of + 1]) - 1, kv_len[of] - 1
        oldest = 0 if window is None else position - window + 1
        assert not any(item[7] for item in items), "there are no wide tiles"
        mine = [item for item in items if item[0] == of and item[1] <= last < item[1] + item[2]]
        seen = [(item[4], min(item[5], position + 1)) for item in mine if item[5] > oldest]
        return {(max(begin, oldest // planner.tiling.length * planner.tiling.length), end) for begin, end in seen}

    alone = parts([1], [length], 0)
    assert len(alone) == (3 if window is None else 1)
    assert parts([700], [length], 0) == alone
    assert parts([3, 40, 1], [90, length, 17], 1) == alone


def test_uniform_lists_are_for_decodes_too() -> None:
    lists = WorkLists(SPEC, dtype=torch.float32, device=CPU, uniform=True)
    inputs = step([5, 40, 17], [])
    paged = lists.of(inputs, BLOCK)
    assert isinstance(paged, PagedPieces)
    by_list = replace(inputs, paged=paged, sequences=(), decodes=None)
    torch.testing.assert_close(attended(by_list, None), attended(inputs, None), rtol=1e-4, atol=1e-4)
