"""Trees of drafts without a model: how chains are merged and walked, and what a plan has of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.models.drafting import Always, Same
from testkit.models.engines import ask

from services.attention.batching.blocks import BlockPool
from services.attention.sequences.plan import Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence
from services.attention.sequences.tree import MAX_NODES, TokenTree
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.gate import NONE, Amount, Gate, amounts
from services.attention.speculation.ngram import NgramSpeculator
from services.attention.speculation.several import Several
from services.attention.speculation.speculator import Wanted
from services.attention.step.flatten import tree_rows
from services.config.speculation import SpeculativeConfig

CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6)


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens on the way to each row."""
    return [[tree.tokens[row - 1] for row in tree.path(end)] for end in range(len(tree.tokens) + 1)]


def test_chains_are_merged_in_depth_first_order() -> None:
    tree = TokenTree.of([[1, 2, 3], [1, 4], [5], [1, 2, 6]], 64)
    assert tree == TokenTree((1, 2, 3, 6, 4, 5), (0, 1, 2, 2, 1, 0))
    assert tree.depths() == [0, 1, 2, 3, 3, 2, 1]
    assert tree.ancestors() == [0, 0b1, 0b11, 0b111, 0b1011, 0b10001, 0b100000]
    assert list(tree.levels()) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1)]
    assert tree.branches
    assert not TokenTree.of([[1, 2], [1]], 9).branches


@given(CHAINS, st.integers(0, 12))
def test_a_tree_has_each_beginning_of_a_chain_once(chains: list[list[int]], most: int) -> None:
    tree = TokenTree.of(chains, most)
    every = list(dict.fromkeys(tuple(chain[:end]) for chain in chains for end in range(1, len(chain) + 1)))
    found = [tuple(path) for path in paths(tree)[1:]]
    assert set(found) == set(every[:most])
    assert len(found) == min(most, len(every))
    assert all(parent < row for row, parent in enumerate(tree.parents, start=1))
    assert tree.depths() == [len(path) for path in paths(tree)]
    for row, word in enumerate(tree.ancestors()):
        assert [bit + 1 for bit in range(most) if word >> bit & 1] == tree.path(row)


@given(CHAINS, st.lists(st.integers(0, 3), max_size=7))
def test_the_walk_ends_where_the_first_other_token_is_drawn(chains: list[list[int]], truth: list[int]) -> None:
    """The walk follows what is drawn: a row's draw is that of its own path."""
    tree = TokenTree.of(chains, 64)
    drawn = [truth[len(path)] if path == truth[: len(path)] and len(path) < len(truth) else 9 for path in paths(tree)]
    walked = [tree.tokens[row - 1] for row in tree.walk(drawn)]
    agreed = [next((at for at, pair in enumerate(zip(chain, truth, strict=False)) if pair[0] != pair[1]),
                   min(len(chain), len(truth))) for chain in chains]  # fmt: skip
    assert walked == truth[: max(agreed, default=0)]


@pytest.mark.parametrize(
    ("token_ids", "count", "chains"),
    [
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [[8, 1], [7, 1]]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [[8, 1]]),
        ([1, 2, 7, 1, 2, 7, 1, 2], 3, [[7, 1]]),  # the places agree in what follows
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 4, [[7, 6], [8, 5]]),  # the place that agrees in more tokens is first
        ([1, 2, 3], 4, []),
    ],
)
def test_branches_are_what_followed_at_several_places(
    token_ids: list[int], count: int, chains: list[list[int]]
) -> None:
    speculator = NgramSpeculator(SpeculativeConfig(method="ngram", num_branches=4))
    state = open_sequence(ask("r", token_ids, max_tokens=9), 1, ())
    assert speculator.chains(state, 2, count) == chains


def test_several_speculators_take_turns() -> None:
    state = open_sequence(ask("r", [1, 2, 3], max_tokens=9), 1, ())
    turns = [Same([[4, 5], [6], [9]]), Same([[6], [7, 8]]), Same([[]])]
    for branches, chains in ((8, [[4, 5], [6], [7, 8], [9]]), (3, [[4, 5], [6], [7, 8]]), (1, [[4, 5]])):
        assert Several(turns).draft([Wanted(state, 2, branches)]) == [chains]
    assert Several([Same([[]]), Same([[7]])]).draft([Wanted(state, 4), Wanted(state, 4)]) == [[[7]], [[7]]]
    silent = Several([Same([[]])])
    assert silent.draft([Wanted(state, 4, 2)]) == [[]]
    assert (silent.may(state), Several(turns).may(state)) == (False, True)
    indices = NgramSpeculator(SpeculativeConfig(method="ngram"))
    indices.drafts(state, 1)
    Several([Same([[]]), indices]).forget(state)
    assert not indices._indices


def test_the_gate_tries_trees_of_the_longest_chains() -> None:
    assert amounts(4, 4) == (NONE, (1, 1), (2, 1), (4, 1), (4, 2), (4, 4))
    assert amounts(4, 1) == (NONE, (1, 1), (2, 1), (4, 1))


@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("sequences", [1, 64])
def test_trees_are_used_where_they_gain_and_cost_nothing_where_not(sequences: int, gain: float) -> None:
    gate, draw = Gate(4, 4), random.Random(3)
    total, seconds = 0, 0.0
    for _ in range(6000):
        amount = gate.amount(sequences)
        took = (0.01 + 0.001 * amount.depth * amount.branches) * draw.uniform(0.95, 1.05)
        drawn = round(sequences * (1 + gain * amount.branches * (amount.depth > 0)))
        total, seconds = total + drawn, seconds + took
        gate.note(sequences, drawn, took)
    best = gate._of(sequences).best
    assert best == (Amount(4, 4) if gain else NONE)
    assert total / seconds >= 0.95 * sequences * (1 + 4 * gain) / (0.01 + 0.016 * (gain > 0))


def _decoding(pool: BlockPool) -> SequenceState:
    state = open_sequence(ask("r", [1, 2, 3], max_tokens=40), 1, ())
    state.computed, state.blocks = 2, pool.take((), 1)
    return state


@pytest.mark.parametrize(
    ("blocks", "used", "nodes"), [(9, 3, 7), (4, 3, 7), (3, 2, 5), (2, 1, 1)], ids=["many", "enough", "spare", "none"]
)
def test_a_tree_gives_its_blocks_back_and_takes_none_that_is_wanted(blocks: int, used: int, nodes: int) -> None:
    """Of 3 tokens that are known one block of 4 holds one more; a tree of 7 nodes needs two more blocks."""
    pool = BlockPool(blocks, 4)
    state = _decoding(pool)
    before = state.blocks
    drafting = Drafting(Same([[4, 5, 6, 7], [4, 8, 9, 7]]), Always(4, 2), pool)
    [piece] = drafting.extend(StepPlan(decodes=(state,)), 64).chains
    assert (len(piece.drafts), pool.used) == (nodes, used)
    drafting.give_back()
    assert pool.used == len(state.blocks) == 1
    assert (state.blocks is before) == (used == 1), "what is kept of a list knows only that it grows"


def test_branches_have_the_rows_that_chains_of_all_leave() -> None:
    pool = BlockPool(100, 4)
    drafting = Drafting(Same([[4, 5, 6, 7], [8, 9, 10, 11]]), Always(4, 2), pool)
    for room, nodes in ((3, [3]), (6, [4, 2]), (10, [6, 4]), (15, [8, 7]), (64, [8, 8])):
        states = (_decoding(pool), _decoding(pool))
        plan = drafting.extend(StepPlan(decodes=states), room)
        assert [len(piece.drafts) for piece in plan.chains] == nodes
        drafting.give_back()


def test_a_tree_is_no_larger_than_what_is_left_of_a_sequence_and_of_a_word() -> None:
    pool = BlockPool(100, 4)
    wide = Same([[number, *range(4, 19)] for number in range(20, 28)])
    for limit, nodes in ((90, MAX_NODES), (20, 16)):
        state = _decoding(pool)
        state.limit = limit
        [piece] = Drafting(wide, Always(16, 8), pool).extend(StepPlan(decodes=(state,)), 500).chains
        assert len(piece.drafts) == nodes


def test_the_outcome_of_a_tree_is_what_was_drawn_along_the_way() -> None:
    tree = TokenTree.of([[4, 5], [4, 6, 7], [8]], 9)
    drawn = [Outcome(token_id=token) for token in (4, 6, 1, 7, 9, 2)]
    outcome = Outcome.verified(drawn, tree.tokens, tree)
    assert outcome.accepted == (1, 3, 4)
    assert [outcome.token_id, *(each.token_id for each in outcome.further)] == [4, 6, 7, 9]


def test_rows_out_of_a_window_are_no_ancestors() -> None:
    rows = tree_rows(TokenTree.of([[1, 2, 3], [1, 4]], 9))
    assert rows.within(None).tolist() == rows.within(4).tolist() == [0, 0b1, 0b11, 0b111, 0b1001]
    assert rows.within(2).tolist() == [0, 0b1, 0b11, 0b110, 0b1001]
    assert rows.within(1).tolist() == [0, 0b1, 0b10, 0b100, 0b1000]


def test_a_piece_without_branches_is_a_chain() -> None:
    state = _decoding(BlockPool(4, 4))
    assert Piece.of_tree(state, TokenTree.of([[4, 5]], 9)) == Piece.chain(state, [4, 5])
    branching = Piece.of_tree(state, TokenTree.of([[4, 5], [6]], 9))
    rows = list(branching.rows)
    assert [row.drafts for row in rows] == [0, 1, 2, 1]
    assert len(set(map(id, rows))) == 4, "each learns by itself how wide its filters are"
    assert all(one is other for one, other in zip(rows, branching.rows, strict=True))
