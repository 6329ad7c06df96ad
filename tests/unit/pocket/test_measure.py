"""Perplexity of a model in every form, and the routers that are shuffled on purpose."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.pocket.evidence import CONFIG, script

from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.measure import agreement as of_vllm
from pocket_moe.measure.agreement import AgreementSettings, heldout_documents, oracle_choices, our_choices, share
from pocket_moe.measure.inputs import open_shards
from pocket_moe.measure.measure import ALL, VARIANTS, MeasureSettings, claims, failures
from pocket_moe.measure.shuffled import Deranged, Uniform, derange, derangement, randomise
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.records import load_csv, load_json

Record = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Path:
    out = tmp_path_factory.mktemp("records")
    options = ["--model", str(toy / "moe"), "--dense", str(toy / "dense"), "--work", str(toy)]
    status = script("evaluate").main([*options, "--out", str(out), "--length", "64", "--device", "cpu"])
    found = load_json(out / "perplexity.json")
    assert status == (3 if failures(found) else 0), "so short a training need not bear out what is claimed"
    return out


@pytest.fixture(scope="module")
def record(records: Path) -> Record:
    found: Record = load_json(records / "perplexity.json")
    return found


def test_every_form_is_measured_on_every_domain(toy: Path, records: Path, record: Record) -> None:
    assert list(record["order"]) == [variant.name for variant in VARIANTS]
    assert record["weights"] == {"model": fingerprint(toy / "moe"), "dense": fingerprint(toy / "dense")}
    for values in record["nats"].values():
        assert set(values) == {"dictionary", "verse", ALL}
    rows = load_csv(records / "perplexity.csv")
    assert len(rows) == 3 * len(VARIANTS)
    assert float(rows[0]["perplexity"]) == pytest.approx(math.exp(float(rows[0]["nats"])), rel=1e-3)


def test_the_mean_is_over_all_tokens_and_agrees_with_the_loss(toy: Path, record: Record) -> None:
    shards = Shards(toy / "shards", "heldout")
    model = export.load(toy / "moe")
    nats = predicted = 0.0
    for first, last in zip(shards.starts[:-1], shards.starts[1:], strict=True):
        for begin in range(first, last, 64):
            piece = torch.from_numpy(shards.tokens[begin : min(begin + 64, last)].astype("int64"))[None]
            nats += float(model.token_losses(piece).sum())
            predicted += piece.shape[1] - 1
    assert record["tokens"][ALL] == predicted
    assert record["nats"]["fp32"][ALL] == pytest.approx(nats / predicted, abs=2e-5)


def test_rounding_costs_little_and_a_shuffled_router_costs(record: Record) -> None:
    ratios = record["claims"]["ratio_over_fp32"]
    for name in ("bf16", "int8_channel", "int8_g128"):
        assert abs(ratios[name] - 1) < 0.02, name
    assert abs(ratios["int4_g128"] - 1) < 0.1
    assert ratios["int4_g128"] != ratios["int8_g128"] != ratios["bf16"]
    assert ratios["deranged"] > 1.001
    assert ratios["random"] > 1.001


def test_claims_that_do_not_hold_are_named() -> None:
    def record(dense: float, shuffled: float) -> dict[str, object]:
        nats = {"fp32": 2.0, "dense": dense, "deranged": shuffled, "random": 3.0}
        return {"claims": claims({name: {ALL: value, "verse": value} for name, value in nats.items()})}

    assert failures(record(2.1, 2.3)) == []
    assert len(failures(record(1.9, 2.3))) == 1
    assert "permuted" in failures(record(2.1, 2.2))[0]
    assert record(1.9, 2.3)["claims"] == {
        "ratio_over_fp32": {"dense": round(math.exp(-0.1), 5), "deranged": 1.34986, "random": 2.71828},
        "dense_wins_in": ["verse"],
    }


@pytest.mark.parametrize("experts", [2, 3, 16])
def test_a_derangement_leaves_no_expert_in_its_place(experts: int) -> None:
    for seed in range(20):
        order = derangement(experts, seed)
        assert sorted(order) == list(range(experts))
        assert all(expert != index for index, expert in enumerate(order))
        assert order == derangement(experts, seed)


def test_permuted_experts_work_where_others_were_chosen(toy: Path) -> None:
    model = export.load(toy / "moe")
    plain = {layer: mlp.choose for layer, mlp in model.moe_layers()}
    derange(model, 5)
    logits_TE = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    orders = []
    for layer, mlp in model.moe_layers():
        ids_TK, weights_TK = plain[layer](logits_TE)
        given_TK, same_TK = mlp.choose(logits_TE)
        order = derangement(8, 5 + layer)
        orders.append(order)
        assert torch.equal(given_TK, torch.tensor(order)[ids_TK])
        assert torch.equal(same_TK, weights_TK)
        assert isinstance(mlp.choose, Deranged)
    assert orders[0] != orders[1]


def test_random_experts_are_different_ones_drawn_evenly(toy: Path) -> None:
    model = export.load(toy / "moe")
    randomise(model, 3)
    _, mlp = next(model.moe_layers())
    assert isinstance(mlp.choose, Uniform)
    skewed_TE = torch.zeros(4000, 8).index_fill(1, torch.tensor([2]), 9.0)
    ids_TK, weights_TK = mlp.choose(skewed_TE)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    counts_E = torch.bincount(ids_TK.flatten(), minlength=8)
    assert (counts_E - 1000).abs().max() < 150
    assert float(weights_TK[:, 0].min()) > 0.9, "the weights stay those of the router's choice"


def test_our_own_engines_choose_alike(toy: Path) -> None:
    settings = AgreementSettings(model=toy / "moe", work=toy, tokens=400, length=48)
    documents = heldout_documents(settings)
    assert max(map(len, documents)) == 47, "one position is for the token that vLLM writes"
    assert all(len(text) > 1 for text in documents)
    oracle, ours = oracle_choices(toy / "moe", documents), our_choices(toy / "moe", documents)
    assert [len(choices) for choices in oracle] == [len(text) - 1 for text in documents]
    assert share(oracle, ours) > 0.9
    assert share([[1, 2], [3]], [[1, 5], [3]]) == pytest.approx(2 / 3, abs=1e-5)


def test_agreement_is_of_the_weights_that_were_served(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AgreementSettings(model=toy / "moe", work=toy, tokens=200, length=48)
    theirs = oracle_choices(toy / "moe", heldout_documents(settings))
    monkeypatch.setattr(of_vllm, "vllm_choices", lambda *_: (theirs, "0.0"))
    found = of_vllm.agreement(settings)
    assert found["weights"] == {"model": fingerprint(toy / "moe")}
    assert found["agree_fp32"] == 1.0


def test_a_claim_that_does_not_hold_has_a_status_of_its_own(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(toy / "moe"), "--work", str(toy), "--out", str(tmp_path)]
    for shared, status in ((0.95, 0), (0.94, 3)):
        monkeypatch.setattr(of_vllm, "agreement", lambda _, share=shared: {"agree_fp32": share})
        assert script("agree").main(given) == status
    module = script("evaluate")
    monkeypatch.setattr(module, "perplexities", lambda *_: {})
    monkeypatch.setattr(module, "csv_rows", lambda _: [])
    monkeypatch.setattr(module, "table", lambda _: [])
    for failed, status in (([], 0), (["it wins"], 3)):
        monkeypatch.setattr(module, "failures", lambda _, failed=failed: failed)
        assert module.main([*given, "--dense", str(toy / "dense")]) == status
    assert "does not hold: it wins" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_match_is_named(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    with pytest.raises(PocketError, match="another tokenizer"):
        open_shards(toy, "heldout", tmp_path)
    with pytest.raises(PocketError, match="no model"):
        open_shards(toy, "heldout", tmp_path / "nowhere")


def test_lengths_are_the_models_and_the_dense_one_is_of_the_work(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stop(settings: object, *_: object) -> None:
        seen.append(settings)
        raise torch.OutOfMemoryError("CUDA out of memory")

    for part, folder in (("shards", "shards"), ("tokenizer", "tokenizer"), ("runs/dense/model", "dense")):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).symlink_to(toy / folder)
    evaluate = script("evaluate")
    monkeypatch.setattr(evaluate, "perplexities", stop)
    monkeypatch.setattr(of_vllm, "agreement", stop)
    for module in (evaluate, script("agree")):
        assert module.main(["--model", str(toy / "moe"), "--work", str(tmp_path)]) == 1
    assert [type(settings) for settings in seen] == [MeasureSettings, AgreementSettings]
    assert [settings.length for settings in seen] == [CONFIG.max_position_embeddings] * 2
    assert seen[0].dense == tmp_path / "runs/dense/model"


def test_a_full_gpu_is_named(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(export, "load", full)
    monkeypatch.setattr(of_vllm, "vllm_choices", full)
    given = ["--work", str(toy), "--model", str(toy / "moe")]
    dense = ["--dense", str(toy / "moe")]
    for name, options, hint in (("evaluate", dense, "--rows"), ("agree", [], "--length"), ("speculate", [], "--rows")):
        assert script(name).main([*given, *options]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: The GPU has too little memory")
        assert f"smaller {hint}" in said


def test_the_command_line_says_what_is_missing(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("evaluate").main(["--model", str(tmp_path), "--work", str(toy)]) == 1
    assert capsys.readouterr().err.startswith("error: There is no model")
    options = ["--model", str(toy / "moe"), "--work", str(toy), "--out", str(tmp_path)]
    assert script("agree").main(options) == 1
    assert "CUDA" in capsys.readouterr().err
