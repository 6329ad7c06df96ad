"""Documents in, batches and rates out: packing loses nothing, and a step's batch depends on its number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pocket_moe.corpus.batches import Batches, BatchSettings
from pocket_moe.corpus.packing import cut, pack, place
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.train.schedule import Schedule

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(8, 32), st.booleans())
def test_packing_keeps_every_token_once_and_in_its_document(lengths: list[int], row: int, anywhere: bool) -> None:
    length = np.array(lengths)
    first = np.concatenate([[0], np.cumsum(length)[:-1]])
    tokens = np.arange(10, 10 + length.sum()).astype(np.uint16)
    pieces = cut(first, length, row, np.random.default_rng(0) if anywhere else None)
    rows = pack(tokens, pieces, row, pad_id=3)
    real = rows.tokens != 3
    assert sorted(rows.tokens[real].tolist()) == tokens.tolist()
    follows = (rows.positions[:, 1:] != 0) & real[:, 1:]
    assert (rows.tokens[:, 1:] - rows.tokens[:, :-1] == 1)[follows].all()
    assert (rows.positions[:, 1:] - rows.positions[:, :-1] == 1)[rows.positions[:, 1:] != 0].all()
    assert (rows.positions[:, 0] == 0).all()
    assert int(((rows.positions == 0) & real).sum()) == len(pieces.length)


def test_a_piece_goes_where_it_leaves_the_least_room() -> None:
    rows, offsets, count = place(np.array([7, 5, 3, 2, 2]), 10)
    assert rows.tolist() == [0, 1, 0, 1, 1]
    assert offsets.tolist() == [0, 0, 7, 5, 7]
    assert count == 2


def test_long_documents_are_cut_and_no_others() -> None:
    pieces = cut(np.array([0, 1100]), np.array([1100, 300]), 512, None)
    assert pieces.first.tolist() == [0, 512, 1024, 1100]
    assert pieces.length.tolist() == [512, 512, 76, 300]


def test_a_step_has_the_same_batch_whatever_ran_before(work: Path) -> None:
    shards = Shards(work / "shards", "train")
    settings = BatchSettings(rows=4, length=64, seed=5)
    with Batches(shards, settings, CPU, pad_id=3) as one, Batches(shards, settings, CPU, pad_id=3) as other:
        last = 2 * one.per_epoch + 1
        batches = [one.batch(step).tokens_BL for step in range(last + 1)]
        assert torch.equal(other.batch(last).tokens_BL, batches[last])
        assert torch.equal(other.batch(3).tokens_BL, batches[3])
        assert not torch.equal(batches[0], batches[one.per_epoch])


def test_weights_repeat_a_domain(work: Path) -> None:
    shards = Shards(work / "shards", "train")
    plain, heavy, only = (
        Batches(shards, BatchSettings(rows=4, length=64, weights=weights), CPU, pad_id=3)
        for weights in ({}, {"verse": 3.0}, {"dictionary": 0.0, "verse": 0.5})
    )
    with plain, heavy, only:
        by_domain = shards.meta.tokens_by_domain["train"]
        assert heavy.per_epoch == (by_domain["dictionary"] + 3 * by_domain["verse"]) // 256
        assert only.per_epoch == by_domain["verse"] // 512
        tokens = torch.cat([only.batch(step).tokens_BL.flatten() for step in range(only.per_epoch)])
        inner = (tokens[:-1] > 3) & (tokens[1:] > 3)
        steps = (tokens[1:] - tokens[:-1])[inner] % 60
        assert float((steps == 7).float().mean()) > 0.95, "words of verse are seven apart"


@pytest.mark.parametrize("weights", [{"nowhere": 1.0}, {"verse": -1.0}, {"verse": 0.0, "dictionary": 0.0}])
def test_weights_that_mean_nothing_are_refused(work: Path, weights: dict[str, float]) -> None:
    with pytest.raises(PocketError):
        Batches(Shards(work / "shards", "train"), BatchSettings(weights=weights), CPU, pad_id=3)


@pytest.mark.parametrize(
    ("tokens", "wsd", "cosine"), [(5, 0.5, 0.5), (10, 1, 1), (55, 1, 0.5), (80, 1, None), (90, 0.5, None), (100, 0, 0)]
)
def test_schedules(tokens: int, wsd: float, cosine: float | None) -> None:
    assert Schedule(kind="wsd", peak=1, floor=0, warmup=10, total=100).rate(tokens) == pytest.approx(wsd)
    if cosine is not None:
        assert Schedule(kind="cosine", peak=1, floor=0, warmup=10, total=100).rate(tokens) == pytest.approx(cosine)
