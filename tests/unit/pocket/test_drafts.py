"""How often speculators are right, alone and as a tree: counted by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pocket_moe.speculators.drafts import BRANCHES, Tally, hits
from pocket_moe.speculators.drafts_runs import DEPTH, runs, tree_nodes

# Six tokens of the target, and the four best of two speculators at each.
LABELS = torch.tensor([1, 2, 3, 4, 5, 6])
FIRST = torch.tensor([[1, 9, 8, 7], [9, 2, 8, 7], [9, 8, 3, 7], [9, 8, 7, 4], [9, 8, 7, 1], [9, 8, 7, 1]])
SECOND = torch.tensor([[1, 9, 8, 7], [2, 9, 8, 7], [8, 9, 7, 3], [9, 4, 8, 7], [5, 9, 8, 7], [9, 8, 7, 1]])


def test_six_tokens_by_hand() -> None:
    found = hits(torch.stack([FIRST, SECOND]), LABELS)
    expected = {
        "alone/0": [1, 0, 0, 0, 0, 0],
        "alone/1": [1, 1, 0, 0, 1, 0],
        "one_each/1": [1, 0, 0, 0, 0, 0],
        "one_each/2": [1, 1, 0, 0, 1, 0],
        # In turn: 1 9 8 7 | 9 2 8 7 | 9 8 3 7 | 9 8 4 7 | 9 5 8 7 1 | 9 8 7 1
        "merged/1": [1, 0, 0, 0, 0, 0],
        "merged/2": [1, 1, 0, 0, 1, 0],
        "merged/4": [1, 1, 1, 1, 1, 0],
        "first_alone/1": [1, 0, 0, 0, 0, 0],
        "first_alone/2": [1, 1, 0, 0, 0, 0],
        "first_alone/4": [1, 1, 1, 1, 0, 0],
    }
    assert {name: hit_N.int().tolist() for name, hit_N in found.items()} == expected


def test_the_record_gives_shares_by_domain() -> None:
    tally, both = Tally(), torch.stack([FIRST, SECOND])
    tally.add("verse", hits(both[:, :2], LABELS[:2]))
    tally.add("perl", hits(both[:, 2:], LABELS[2:]))
    tally.add("verse", hits(both[:, :1], LABELS[:1]))
    record = tally.record()
    assert record["positions"] == {"verse": 3, "perl": 4, "all": 7}
    assert record["accepted"]["alone/0"] == {"verse": round(2 / 3, 5), "perl": 0.0, "all": round(2 / 7, 5)}
    assert record["accepted"]["merged/4"]["all"] == round(6 / 7, 5)


def test_runs_by_hand() -> None:
    """Two texts in the first row, of six labels and of three, too few; one in the second row, of four."""
    known_BL = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    found = {
        "alone/0": torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]).bool(),
        "alone/1": torch.tensor([1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]).bool(),
        "merged/2": torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1]).bool(),
    }
    found["one_each/2"] = found["alone/0"] | found["alone/1"]
    lengths = {name: length_W.tolist() for name, length_W in runs(found, known_BL).items()}
    assert lengths == {
        "alone/0": [2, 1, 0, 4],
        "alone/1": [1, 0, 4, 0],
        "merged/2": [4, 4, 4, 2],
        "one_each/1": [2, 1, 0, 4],
        # Where the two are right in turn, no draft of either is.
        "one_each/2": [2, 1, 4, 4],
    }
    tally = Tally()
    tally.add("verse", runs(found, known_BL))
    record = tally.record()
    assert record["positions"] == {"verse": 4, "all": 4}
    assert record["accepted"]["alone/0"] == {"verse": 1.75, "all": 1.75}


def test_a_tree_of_every_choice_is_large() -> None:
    assert [tree_nodes(branches) for branches in (1, 2, 4)] == [4, 30, 340]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 2**32))
def test_runs_are_those_of_each_text_read_alone(labelled: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    known_L = torch.cat([torch.ones(DEPTH), *(torch.tensor([0] + [1] * count) for count in labelled)]).bool()
    hit_N = torch.rand(int(known_L.sum()), generator=draw) < 0.7
    expected, first = [], 0
    for count in (DEPTH, *labelled):
        text = hit_N[first : first + count].int().tolist()
        drafts = [text[start : start + DEPTH] for start in range(count - DEPTH + 1)]
        expected += [(*draft, 0).index(0) for draft in drafts]
        first += count
    assert runs({"alone/0": hit_N}, known_L[None])["alone/0"].tolist() == expected


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_trees_only_gain_by_growing(speculators: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(9, generator=draw)[:4] for _ in range(12 * speculators)]
    candidates = torch.stack(drawn).reshape(speculators, 12, 4)
    labels = torch.randint(0, 9, (12,), generator=draw)
    found = hits(candidates, labels)
    for kind in ("merged", "first_alone"):
        for small, large in itertools.pairwise(BRANCHES):
            assert (found[f"{kind}/{small}"] <= found[f"{kind}/{large}"]).all()
    assert (found["one_each/1"] == found["merged/1"]).all()
    widest = max(count for count in BRANCHES if count <= speculators)
    assert (found[f"one_each/{widest}"] <= found[f"merged/{widest}"]).all()
    if speculators == 1:
        assert all((found[f"merged/{k}"] == found[f"first_alone/{k}"]).all() for k in BRANCHES)


def test_too_few_candidates_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        hits(torch.stack([FIRST[:, :2]]), LABELS)
