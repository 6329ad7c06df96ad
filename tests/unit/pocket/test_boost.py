"""Speculators that learn what those before them miss."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from testkit.pocket.evidence import CONFIG, script

from pocket_moe.config import PocketConfig, tiny
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.model.losses import NO_TARGET
from pocket_moe.model.model import PocketMoe
from pocket_moe.records import load_json, save_json
from pocket_moe.speculators.boost import BoostSettings, boost, right, train_one, union_share
from pocket_moe.speculators.boost_rows import (
    LabelledRows,
    WeightedSource,
    Written,
    continuations,
    continue_rows,
    label,
    pack_documents,
)

SMALL = tiny("llama", vocab_size=CONFIG.vocab_size)
QUICK = BoostSettings(count=2, floors=(0.0, 0.5), steps=12, boost_steps=8, rows=4, dtype=torch.float32, aside=0.2)


@pytest.fixture(scope="module")
def target(toy: Path) -> PocketMoe:
    return export.load(toy / "moe")


@pytest.fixture(scope="module")
def rows(toy: Path, target: PocketMoe) -> LabelledRows:
    shards = Shards(toy / "shards", "train")
    return label(target, pack_documents(shards, np.arange(200), 64, pad_id=3), batch_rows=8)


def test_labels_are_what_the_target_says_of_each_document_alone(target: PocketMoe, rows: LabelledRows) -> None:
    for row in (0, len(rows) // 2, len(rows) - 1):
        tokens, positions, labels = rows.tokens_RL[row].long(), rows.positions_RL[row], rows.labels_RL[row]
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for first, last in itertools.pairwise(starts):
            text = tokens[first:last]
            if text[0] != 3:
                with torch.no_grad():
                    said = target(text[None])[0].argmax(1)
                assert labels[first : last - 1].tolist() == said[:-1].tolist()
            assert labels[last - 1] == NO_TARGET


def test_weights_and_targets_reach_the_batch(rows: LabelledRows) -> None:
    weights_RL = torch.rand(rows.labels_RL.shape)
    source = WeightedSource(rows, weights_RL, batch_rows=4, seed=1)
    seen = []
    for step in range(source.per_epoch):
        batch = source.batch(step)
        assert batch.targets_BL is not None
        assert batch.weights_BL is not None
        for row in range(4):
            same = (rows.tokens_RL == batch.tokens_BL[row]).all(1) & (weights_RL == batch.weights_BL[row]).all(1)
            seen += same.nonzero().flatten().tolist()
            assert torch.equal(batch.targets_BL[row], rows.labels_RL[seen[-1]].long())
    assert len(set(seen)) == len(seen) == 4 * source.per_epoch
    again = WeightedSource(rows, weights_RL, batch_rows=4, seed=1)
    assert torch.equal(source.batch(3).tokens_BL, again.batch(3).tokens_BL)
    assert not torch.equal(source.batch(0).tokens_BL, source.batch(source.per_epoch).tokens_BL)
    with pytest.raises(PocketError, match="fewer than"):
        WeightedSource(rows, weights_RL, batch_rows=10_000, seed=1)


def test_what_weighs_nothing_teaches_nothing(rows: LabelledRows) -> None:
    """Half of the positions get labels that are wrong, and weight 0: training is as if they had none."""
    even_L = torch.arange(64) % 2 == 0
    wrong_RL = torch.where(even_L & (rows.labels_RL != NO_TARGET), 7, rows.labels_RL).to(torch.int16)
    wrong = dataclasses.replace(rows, labels_RL=wrong_RL)
    none = dataclasses.replace(rows, labels_RL=rows.labels_RL.masked_fill(even_L, NO_TARGET))
    covered_RL = even_L.expand(rows.labels_RL.shape)
    trained = [train_one(SMALL, part, covered_RL, 0.0, QUICK, None, 0) for part in (wrong, none)]
    for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_pool_covers_more_than_its_first(rows: LabelledRows) -> None:
    pool = boost(SMALL, rows, QUICK)
    assert len(pool.speculators) == 2
    assert [(row["speculator"], row["floor"]) for row in pool.tried] == [(0, 1.0), (1, 0.0), (1, 0.5)]
    assert max(row["union_aside"] for row in pool.tried[1:]) > pool.tried[0]["union_aside"]
    first, second = (right(model, rows, 8) for model in pool.speculators)
    assert not torch.equal(first, second)
    labelled = int((rows.labels_RL != NO_TARGET).sum())
    share = union_share(pool.speculators[1], rows, first, 8)
    assert share == pytest.approx(int((first | second).sum()) / labelled)


def test_each_learns_what_all_before_it_miss(rows: LabelledRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With given models in place of trained ones, to see what each is asked to learn and where it begins."""
    seen: list[tuple[LabelledRows, torch.Tensor, PocketMoe | None]] = []
    nothing_RL = torch.zeros_like(rows.labels_RL, dtype=torch.bool)
    models = [train_one(SMALL, rows, nothing_RL, 1.0, QUICK, None, index) for index in range(3)]

    def given(config: PocketConfig, *rest: Any) -> PocketMoe:
        learn, covered_RL, floor, settings, start, index = rest
        assert (config, settings, floor) == (SMALL, three, 0.0 if index else 1.0)
        seen.append((learn, covered_RL.clone(), start))
        return models[index]

    three = dataclasses.replace(QUICK, count=3, floors=(0.0,))
    monkeypatch.setattr("pocket_moe.speculators.boost.train_one", given)
    assert boost(SMALL, rows, three).speculators == models
    learn, covered = seen[0][0], [covered_RL for _, covered_RL, _ in seen]
    first, second = (right(model, learn, 8) for model in models[:2])
    assert not covered[0].any()
    assert torch.equal(covered[1], first)
    assert torch.equal(covered[2], first | second)
    assert covered[2].sum() > covered[1].sum() > 0
    assert [start for _, _, start in seen] == [None, models[0], models[0]]


def test_a_boosted_one_begins_with_the_weights_of_the_first(rows: LabelledRows) -> None:
    first = train_one(SMALL, rows, torch.zeros_like(rows.labels_RL, dtype=torch.bool), 1.0, QUICK, None, 0)
    settings = dataclasses.replace(QUICK, boost_steps=0)
    same = train_one(SMALL, rows, right(first, rows, 8), 0.0, settings, first, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))


def test_the_target_goes_on_as_it_does_alone_and_behind_the_end_comes_padding(toy: Path) -> None:
    target, prompts_BP = export.load(toy / "moe"), torch.tensor([[5, 6, 7], [9, 16, 23], [60, 61, 62]])
    for end in (0, int(continue_rows(target, prompts_BP, 9)[0, 5])):
        target.config = dataclasses.replace(target.config, eos_token_id=end)
        written = continue_rows(target, prompts_BP, 9)
        for row, prompt in zip(written.tolist(), prompts_BP.tolist(), strict=True):
            ids, ended = list(prompt), False
            for _ in range(9):
                with torch.no_grad():
                    best = int(target(torch.tensor([[token for token in ids if token != 3]]))[0, -1].argmax())
                ids.append(3 if ended else best)
                ended = ended or best == end
            assert row == ids
    assert (written == 3).any()


def test_continuations_are_labelled_with_themselves(toy: Path, target: PocketMoe) -> None:
    shards = Shards(toy / "shards", "train")
    shape = Written(prompt=4, new=12, length=40)
    rows = continuations(target, shards, np.arange(9), shape, batch_rows=4)
    assert rows.tokens_RL.shape[1] == 40
    texts = rows.tokens_RL[:, :32].reshape(-1, 16)
    labels = rows.labels_RL[:, :32].reshape(-1, 16)
    long_enough = np.flatnonzero(np.diff(shards.starts)[:9] > 4)
    for text, said, document in zip(texts.tolist(), labels.tolist(), long_enough, strict=False):
        assert text[:4] == shards.tokens[shards.starts[document] :][:4].tolist()
        ended = text.index(3) if 3 in text else 16
        assert said[:3] == [NO_TARGET] * 3
        assert said[3 : ended - 1] == text[4:ended]
        assert all(token == NO_TARGET for token in said[ended:])
    assert int((rows.labels_RL != NO_TARGET).sum()) > 20


def test_the_script_makes_speculators_and_their_acceptance(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("speculate")

    def small(target: PocketConfig, *, layers: int) -> PocketConfig:
        assert target == CONFIG
        assert layers == 3
        return SMALL

    monkeypatch.setattr(module, "speculator", small)
    out, folder = tmp_path / "records", tmp_path / "speculators"
    options = ["--model", str(toy / "moe"), "--work", str(toy), "--out", str(out), "--speculators", str(folder)]
    quick = ["--count", "2", "--steps", "6", "--boost-steps", "4", "--rows", "4", "--length", "64", "--own", "40"]
    quick += ["--own-prompts", "5", "--dtype", "float32", "--device", "cpu"]
    for stale in ("1", "2", "10", "notes"):
        (folder / stale).mkdir(parents=True)
    assert module.main([*options, *quick]) == 0
    record = load_json(out / "acceptance.json")
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "notes"]
    assert record["bytes"] == [SMALL.parameters() * 2] * 2
    assert len(record["tried"]) == 3
    pool = [fingerprint(folder / index) for index in "01"]
    assert record["weights"] == {"model": fingerprint(toy / "moe"), "speculators": pool}
    assert not list(folder.rglob("tokenizer*")), "they take the target's"
    assert (toy / "moe/tokenizer.json").is_file()
    runs = record["own_output"]["runs"]
    assert record["depth"] == 4
    assert 0 < runs["positions"]["all"] < record["own_output"]["positions"]["all"]
    assert 0 <= runs["accepted"]["alone/0"]["all"] <= runs["accepted"]["one_each/2"]["all"] <= 4
    for kind in ("teacher_forcing", "own_output"):
        accepted = record[kind]["accepted"]
        assert 0 <= accepted["alone/0"]["all"] == accepted["merged/1"]["all"] <= accepted["merged/4"]["all"] <= 1
        assert record[kind]["positions"]["all"] > 0
    assert module.main([*options, *quick, "--measure-only"]) == 0
    assert load_json(out / "acceptance.json") == record
    save_json(out / "acceptance.json", record | {"weights": {"speculators": pool[:1]}})
    assert module.main([*options, *quick, "--measure-only"]) == 0
    assert load_json(out / "acceptance.json") == record | {"tried": []}, "another pool's training"
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    assert module.main([*options, *quick]) == 1
    assert "fewer --layers" in capsys.readouterr().err
