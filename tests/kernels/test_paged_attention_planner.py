"""Work lists of ``paged_attention``: each row meets each position once, programs get about as much, room suffices."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from testkit.models.attention_steps import small_tiling

from moe_kernels import ArgumentError
from moe_kernels.paged_attention.op import EVERYTHING
from moe_kernels.paged_attention.planner import HEADER, ITEM, MERGED, Planner
from moe_kernels.paged_attention.tiling import Tiling, tiling_for

H200 = tiling_for(heads=32, kv_heads=4, head_dim=128, itemsize=2, multiprocessors=132)
DECODES = tiling_for(heads=32, kv_heads=4, head_dim=128, itemsize=2, multiprocessors=132, prompts=False)
SEQUENCES = st.integers(0, 70).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(rows, 3000)))
Words = NDArray[np.int32]


def items(words: Words) -> list[list[int]]:
    found: list[list[int]] = words[HEADER : HEADER + ITEM * words[0]].reshape(-1, ITEM).tolist()
    return found


def merged(planner: Planner, words: Words) -> list[list[int]]:
    at = planner.room.merged_at
    found: list[list[int]] = words[at : at + MERGED * words[1]].reshape(-1, MERGED).tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SEQUENCES, max_size=6), st.none() | st.integers(1, 900), st.sampled_from([None, 16, 512]),
    st.booleans(), st.sampled_from([(1, 1), (8, 2), (6, 2)]), st.integers(1, 60), st.integers(0, 40),
)  # fmt: skip
def test_each_row_meets_each_position_once(
    sequences: list[tuple[int, int]], window: int | None, split: int | None, prompts: bool, heads: tuple[int, int],
    programs: int, spare: int,
) -> None:  # fmt: skip
    rows, kv_len = [each[0] for each in sequences], [each[1] for each in sequences]
    tiling = small_tiling(*heads, 16, prompts=prompts, programs=programs)
    planner = Planner(
        tiling, rows=sum(rows) + spare, sequences=len(rows), positions=max([1, *kv_len]), window=window, split=split
    )
    words = planner.plan(rows, kv_len)
    _check_rows(planner, words, _wanted(rows, kv_len, window, sum(rows) + spare))


def _wanted(rows: list[int], kv_len: list[int], window: int | None, total: int) -> list[tuple[int, int, int]]:
    """Of each row its sequence, and the first and the last position that it sees; -1 where there is none."""
    found = [
        (sequence, max(0, position - window + 1) if window else 0, position)
        for sequence, (count, length) in enumerate(zip(rows, kv_len, strict=True))
        for position in range(length - count, length)
    ]
    return found + [(-1, 0, -1)] * (total - len(found))


def _check_rows(planner: Planner, words: Words, wanted: list[tuple[int, int, int]]) -> None:
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for sequence, row, count, position, begin, end, slot, wide in items(words):
        assert 1 <= count <= (planner.tiling.wide_rows if wide else planner.tiling.narrow_rows)
        assert begin % planner.tiling.length == 0
        for at in range(count):
            owner, _, last = wanted[row + at]
            assert owner < 0 or (owner, last) == (sequence, position + at)
            parts.setdefault(row + at, []).append((begin, end, slot + at if slot >= 0 else -1))
    assert sorted(parts) == list(range(len(wanted)))
    listed = {row: [first + step * part for part in range(count)] for row, first, step, count in merged(planner, words)}
    assert len(listed) == int(words[1])
    slots = [slot for row in parts for _, _, slot in parts[row] if slot >= 0]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=-1) < planner.room.slots
    for row, (_, first, last) in enumerate(wanted):
        _check_row(sorted(parts[row]), listed.get(row), first, last, planner.tiling.length)


def _check_row(parts: list[tuple[int, int, int]], listed: list[int] | None, first: int, last: int, length: int) -> None:
    """Parts of a row lie one behind another, from the first position that it sees or before, past its last."""
    assert parts[0][0] <= first
    assert all(end % length == 0 for _, end, _ in parts[:-1])
    assert parts[-1][1] > last
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    slots = [slot for _, _, slot in parts]
    assert slots == ([-1] if listed is None else listed)
    assert listed is None or len(listed) > 1


def test_the_example() -> None:
    planner = Planner(small_tiling(4, 1, 16, prompts=False), rows=4, sequences=2, positions=8)
    words = planner.plan([2, 1], [5, 3])
    assert items(words) == [[0, 0, 2, 3, 0, 5, -1, 0], [1, 2, 1, 2, 0, 3, -1, 0], [2, 3, 1, -1, 0, 0, -1, 0]]
    assert words[:HEADER].tolist() == [3] + [0] * 7


def test_windows_leave_out_what_no_row_sees() -> None:
    planner = Planner(small_tiling(2, 1, 16), rows=1, sequences=1, positions=1000, window=100)
    assert items(planner.plan([1], [1000]))[0][4:6] == [896, 1000]


def test_parts_begin_at_multiples_of_the_split() -> None:
    """Also where a window moves the first position, so that the same positions are summed together at each step."""
    planner = Planner(small_tiling(2, 1, 16), rows=1, sequences=1, positions=400, window=100, split=48)
    ranges = sorted(item[4:6] for item in items(planner.plan([1], [231])))
    assert ranges == [[128, 144], [144, 192], [192, 231]]


MIXES: dict[str, tuple[list[int], list[int]]] = {
    "one long": ([1], [32_768]),
    "few": ([1] * 8, [32_768] * 8),
    "one more than programs": ([1] * 34, [4096] * 34),
    "many": ([1] * 512, [500 + 37 * (each % 100) for each in range(512)]),
    "one long among short ones": ([1] * 64, [100_000] + [800] * 63),
    "prompt": ([8192], [8192]),
    "long prompt": ([32_768], [32_768]),
    "last chunk of a long one": ([512], [100_000]),
    "rows to verify": ([5] * 64, [2000 + 100 * each for each in range(64)]),
    "decodes and chunks": (
        [1] * 256 + [400] * 20,
        [1000 + 9 * each for each in range(256)] + [400 * each for each in range(1, 21)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tiling", [H200, DECODES], ids=["prompts", "decodes"])
def test_programs_have_about_as_much_to_do(tiling: Tiling, mix: str) -> None:
    """By positions; the busiest program against the mean."""
    rows, kv_len = MIXES[mix]
    planner = Planner(tiling, rows=sum(rows), sequences=len(rows), positions=100_000)
    loads = _loads(planner, planner.plan(rows, kv_len))
    assert max(loads) <= 1.35 * sum(loads) / len(loads)


def _loads(planner: Planner, words: Words) -> list[float]:
    """As :func:`moe_kernels.paged_attention.kernel.unit_of` deals them."""
    tiling = planner.tiling
    costs = [(end - begin) * (tiling.wide_cost if wide else 1) for *_, begin, end, _, wide in items(words)]
    loads = [0.0] * tiling.programs
    for unit, cost in enumerate(np.repeat(costs, tiling.kv_heads).tolist()):
        turn, place = divmod(unit, tiling.programs)
        loads[place if turn % 2 == 0 else tiling.programs - 1 - place] += cost
    return loads


@pytest.mark.parametrize("mine", [(1, 5000), (5, 5000), (16, 3000), (300, 3000)], ids=str)
def test_with_a_split_a_sequence_is_cut_alike_in_any_batch(mine: tuple[int, int]) -> None:
    def cuts(mates: list[tuple[int, int]], split: int | None) -> Counter[tuple[int, ...]]:
        rows, kv_len = zip(mine, *mates, strict=True)
        planner = Planner(H200, rows=600, sequences=600, positions=9000, split=split)
        found = items(planner.plan(rows, kv_len))
        return Counter((*item[1:6], item[7], item[6] < 0) for item in found if item[0] == 0)

    batches: list[list[tuple[int, int]]] = [[], [(1, 9000)] * 299, [(200, 200)]]
    alone, *others = [cuts(mates, 1024) for mates in batches]
    assert others == [alone, alone]
    assert len({tuple(sorted(cuts(mates, None))) for mates in batches}) > 1  # else this shows nothing


def test_memory_for_sums_of_parts_is_bounded_by_the_gpu() -> None:
    """70 MB for an H200's programs, however long a prompt or how many rows; without wide tiles less."""
    for rows, positions in ((512, 32_768), (32_768, 32_768), (100_000, 1_000_000)):
        for tiling in (H200, DECODES):
            room = Planner(tiling, rows=rows, sequences=512, positions=positions).room
            assert room.slots * tiling.heads * tiling.head_dim * 4 <= 70e6
    assert Planner(H200, rows=512, sequences=512, positions=200).room.slots == 0


def test_items_of_prompts_are_as_many_as_tiles() -> None:
    words = Planner(H200, rows=32_768, sequences=1, positions=32_768).plan([32_768], [32_768])
    assert words[:2].tolist() == [32_768 // 8, 0]


@pytest.mark.parametrize(
    ("rows", "kv_len", "words"),
    [
        ([5, 6], [9, 9], "room for 10 rows, found 11"),
        ([1] * 4, [1] * 4, "room for 3 sequences, found 4"),
        ([1], [65], "room for 64 positions, found 65"),
        ([2], [1], "rows must not be negative, nor more than the positions"),
        ([-1, 1], [1, 1], "rows must not be negative"),
        ([1, 1], [1], r"rows and kv_len must be \[S\], found \(2,\) and \(1,\)"),
        (1, 1, r"must be \[S\], found \(\) and \(\)"),
        ([1, 1], [64, 64], "room for 2 slots, found 8: split less often"),
    ],
)
def test_what_there_is_no_room_for(rows: object, kv_len: object, words: str) -> None:
    planner = Planner(small_tiling(2, 1, 16), rows=10, sequences=3, positions=64, split=16, slots=2)
    with pytest.raises(ArgumentError, match=words):
        planner.plan(rows, kv_len)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": -1}, "rows must not be negative"),
        ({"sequences": 1.0}, "sequences must be an integer"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"split": 8}, "split must be at least 16"),
        ({"split": 40}, "split must be a multiple of the tiles' 16 positions, found 40"),
        ({"slots": -1}, "slots must not be negative"),
    ],
)
def test_numbers_of_a_planner(change: dict[str, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        Planner(small_tiling(2, 1, 16), **{"rows": 4, "sequences": 2, "positions": 64, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "3 query heads do not divide into 2"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"head_dim": 257}, "head_dim must be at most 256"),
        ({"itemsize": 8}, "itemsize must be 2 or 4, found 8"),
        ({"multiprocessors": 0}, "multiprocessors must be at least 1"),
    ],
)
def test_numbers_of_a_tiling(change: dict[str, int], words: str) -> None:
    given = {"heads": 4, "kv_heads": 2, "head_dim": 64, "itemsize": 2, "multiprocessors": 132}
    with pytest.raises(ArgumentError, match=words):
        tiling_for(**{**given, **change})


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (32, 4), (16, 16), (71, 1), (40, 8), (200, 1)])
@pytest.mark.parametrize("prompts", [True, False])
def test_a_row_fits_every_tile(heads: int, kv_heads: int, prompts: bool) -> None:
    tiling = tiling_for(heads=heads, kv_heads=kv_heads, head_dim=128, itemsize=2, multiprocessors=132, prompts=prompts)
    assert tiling.narrow_rows >= 1
    assert (tiling.wide_rows > tiling.narrow_rows) == prompts


def test_positions_less_the_window_that_hides_nothing_are_32_bits() -> None:
    """Rows of no sequence have the lowest positions, down to minus the rows of a step; the planner bounds both."""
    for argument, most in (("rows", 2**24), ("positions", 2**30)):
        sizes = {"rows": 1, "sequences": 1, "positions": 1}
        with pytest.raises(ArgumentError, match=argument):
            Planner(H200, **(sizes | {argument: most + 1}))
    assert -(2**24) - EVERYTHING >= -(2**31)
    assert EVERYTHING >= 2**30
