"""Attention of rows that branch against its definition: each row sees what is known and the way to it, nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.attention_steps import Step, random_parents, small_tiling, tree_rows
from testkit.models.tolerances import assert_close

from moe_kernels import ArgumentError, backend
from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.trees import MOST, SEEN, TreeRows

FORK = [0, 1, 0, 3, 3]
MIX = [(6, 40), (1, 20), (20, 20), (6, 33)]
"""Two trees of six rows, between them a decode and a prompt."""


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(4, 2, 16, 16), (6, 2, 24, 32), (20, 1, 8, 5)])
def test_equals_the_definition(heads: int, kv_heads: int, head_dim: int, block: int, window: int | None) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block": block}
    step = Step(MIX, **shape, window=window, spare=3, trees={0: FORK, 3: [0, 0, 0, 0, 0]})
    assert_close(step(), step.expected())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("split", [None, 16])
@pytest.mark.parametrize("prompts", [True, False])
def test_as_many_rows_as_a_word_has_bits(prompts: bool, split: int | None, window: int | None) -> None:
    """In several tiles, narrow or wide, and parts; both halves of the words are needed."""
    parents = random_parents(1 + MOST, 5)
    step = Step(
        [(1 + MOST, 150), (3, 9)], split=split, window=window, tiling=small_tiling(2, 1, 16, prompts=prompts),
        sinks=True, trees={0: parents, 1: [0, 0]},
    )  # fmt: skip
    assert_close(step(), step.expected(), roundings=32)


def _steps() -> st.SearchStrategy[list[tuple[int, int]]]:
    rows = st.integers(1, 40).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(rows, 80)))
    return st.lists(rows, min_size=1, max_size=4)


@pytest.mark.usefixtures("path")
@settings(max_examples=10, deadline=None)
@given(
    _steps(), st.sampled_from([(1, 1), (4, 2), (5, 1)]), st.sampled_from([16, 64]), st.none() | st.integers(1, 60),
    st.sampled_from([None, 16, 48]), st.integers(0, 3), st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_any_step(
    sequences: list[tuple[int, int]], heads: tuple[int, int], block: int, window: int | None, split: int | None,
    spare: int, seed: int, prompts: bool,
) -> None:  # fmt: skip
    trees = {each: random_parents(rows, seed + each) for each, (rows, _) in enumerate(sequences) if each % 3 != 1}
    step = Step(
        sequences, heads=heads[0], kv_heads=heads[1], head_dim=8, block=block, window=window, split=split, spare=spare,
        tiling=small_tiling(*heads, 8, prompts=prompts), trees=trees,
    )  # fmt: skip
    assert_close(step(), step.expected(), roundings=32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [None, 9])
def test_a_list_with_room_for_trees_serves_steps_without(window: int | None) -> None:
    step = Step([(1, 40), (20, 33)], window=window, spare=2, trees={})
    assert step.planner.room.trees
    assert_close(step(), step.expected())


@pytest.mark.parametrize(("rows", "positions"), [(5, 61), (1 + MOST, 150)])
def test_a_chain_by_words_is_the_chain(rows: int, positions: int) -> None:
    with backend.forced("triton"):
        chain, tree = Step([(rows, positions)]), Step([(rows, positions)], trees={0: range(rows - 1)})
        assert torch.equal(chain(), tree())


@pytest.mark.usefixtures("path")
def test_the_other_branch_is_not_seen() -> None:
    step = Step([(3, 20)], trees={0: [0, 0]})
    before = step()
    step.v[step.blocks[0, 1], 18 % 16] += 100.0  # the place of row 1
    after = step()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


def test_the_words_of_the_example() -> None:
    planner = Planner(small_tiling(1, 1, 1), rows=4, sequences=1, positions=5, window=4, trees=True)
    words = planner.plan([3], [5], {0: tree_rows([0, 0])})
    seen = words[planner.room.seen_at :].reshape(-1, SEEN).tolist()
    assert seen == [[0, 3, 0, 0], [0, 3, 1, 0], [0, 3, 2, 0], [0, 0, 0, 0]]


GOOD = tree_rows([0, 0])
BAD: list[tuple[dict[int, TreeRows], str]] = [
    ({1: GOOD}, "there is no sequence 1 that could branch"),
    ({0: tree_rows([0])}, r"sequence 0 has 3 rows, found a tree of \(2,\) and \(2,\)"),
    ({0: replace(GOOD, ancestors_W=np.array([0, 1, 6], dtype=np.uint64))}, "itself and no later row"),
    ({0: replace(GOOD, ancestors_W=np.array([0, 3, 2], dtype=np.uint64))}, "itself and no later row"),
    ({0: replace(GOOD, ancestors_W=np.array([1, 1, 2], dtype=np.uint64))}, "itself and no later row"),
    ({0: replace(GOOD, ancestors_W=np.array([0, 1, 2]))}, "ancestors must be uint64, found int64"),
]


@pytest.mark.parametrize(("trees", "words"), BAD, ids=range(len(BAD)))
def test_bad_trees(trees: dict[int, TreeRows], words: str) -> None:
    planner = Planner(small_tiling(1, 1, 1), rows=3, sequences=1, positions=5, trees=True)
    with pytest.raises(ArgumentError, match=words):
        planner.plan([3], [5], trees)


def test_trees_that_a_list_has_no_words_for_and_too_many_rows() -> None:
    with pytest.raises(ArgumentError, match="plan it with trees=True"):
        Planner(small_tiling(1, 1, 1), rows=3, sequences=1, positions=5).plan([3], [5], {0: GOOD})
    planner = Planner(small_tiling(1, 1, 1), rows=80, sequences=1, positions=80, trees=True)
    many = 2 + MOST
    tree = TreeRows(np.zeros(many, dtype=np.int64), np.zeros(many, dtype=np.uint64))
    with pytest.raises(ArgumentError, match=r"a tree may have 1\.\.65 rows, found 66"):
        planner.plan([many], [many], {0: tree})
