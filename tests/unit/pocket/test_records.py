"""Traces of experts, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.pocket.evidence import script

from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.measure.traffic import choose_documents, load_record, peak, trace
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.records import ExpertTrace, Greedy, load_csv, load_greedy, load_json, save_csv, save_greedy, save_json


def drawn(experts: int, slots: int, lengths: list[int], seed: int = 0) -> ExpertTrace:
    rng = np.random.default_rng(seed)
    choices = rng.permuted(np.tile(np.arange(experts), (sum(lengths), 3, 1)), axis=2)[:, :, :slots]
    return ExpertTrace(
        ids=np.sort(choices, axis=2).astype(np.uint8),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        document_domain=rng.integers(0, 2, len(lengths)).astype(np.uint8),
        domains=("dictionary", "verse"),
        experts=experts,
    )


@pytest.mark.parametrize(("experts", "slots"), [(16, 4), (16, 3), (8, 2), (8, 1), (64, 8)])
def test_a_trace_comes_back_as_it_was(experts: int, slots: int, tmp_path: Path) -> None:
    before = drawn(experts, slots, [3, 1, 7])
    before.save(tmp_path / "a.npz")
    after = ExpertTrace.load(tmp_path / "a.npz")
    assert (after.ids == before.ids).all()
    assert after.ids.dtype == np.uint8
    assert (after.starts == before.starts).all()
    assert (after.domain == before.domain).all()
    assert (after.domains, after.experts) == (before.domains, experts)
    before.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_trace_of_the_real_size_is_small(tmp_path: Path) -> None:
    trace = drawn(16, 4, [100] * 200)
    trace.save(tmp_path / "a.npz")
    per_choice = (tmp_path / "a.npz").stat().st_size / (20_000 * 3)
    assert per_choice < 1.6, "bytes for four experts; 200k tokens of five layers then fit 1.6 MB even if drawn evenly"


def test_no_damage_goes_unnoticed(tmp_path: Path) -> None:
    """Bytes overwritten anywhere: the trace is refused, or what was hit says nothing (a time, a comment)."""
    before = drawn(16, 4, [30, 10, 70])
    before.save(tmp_path / "a.npz")
    data, refused = (tmp_path / "a.npz").read_bytes(), 0
    offsets = range(0, len(data), 7)
    for offset in offsets:
        for value in (b"\x00\x00\x00", b"\xff\xff\xff", b"\x07"):
            (tmp_path / "b.npz").write_bytes(data[:offset] + value + data[offset + len(value) :])
            try:
                after = ExpertTrace.load(tmp_path / "b.npz")
            except PocketError:
                refused += 1
            else:
                assert (after.ids == before.ids).all()
                assert (after.starts == before.starts).all()
    assert refused > 2 * len(offsets)
    for length in range(0, len(data), 101):
        (tmp_path / "b.npz").write_bytes(data[:length])
        with pytest.raises(PocketError, match="cannot be read"):
            ExpertTrace.load(tmp_path / "b.npz")
    with pytest.raises(PocketError, match="cannot be read"):
        ExpertTrace.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lengths", np.array([3, 1, 8], np.uint16)),
        ("lengths", np.array([3, 8], np.uint16)),
        ("document_domain", np.array([0, 2, 0], np.uint8)),
        ("shape", np.array([11, 3, 4, 8])),
        ("shape", np.array([10, 3, 4, 16])),
        ("shape", np.array([11, 3, 4])),
        ("ids", np.array(7)),
        ("ids", np.zeros(7, np.uint8)),
        ("lengths", np.array(["a"])),
    ],
)
def test_arrays_that_contradict_one_another_are_refused(name: str, value: np.ndarray, tmp_path: Path) -> None:
    before = drawn(16, 4, [3, 1, 7])
    before.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        np.savez(tmp_path / "b.npz", **{key: file[key] for key in file.files} | {name: value})
    with pytest.raises(PocketError, match="cannot be read"):
        ExpertTrace.load(tmp_path / "b.npz")


def test_counts_are_by_domain_layer_and_expert() -> None:
    trace = ExpertTrace(
        ids=np.array([[[0, 1]], [[0, 2]], [[1, 2]]], np.uint8),
        starts=np.array([0, 2, 3]),
        document_domain=np.array([1, 0], np.uint8),
        domains=("dictionary", "verse"),
        experts=4,
    )
    assert trace.counts().tolist() == [[[0, 1, 1, 0]], [[2, 1, 1, 0]]]
    record = load_record(trace)
    assert record["tokens"] == {"dictionary": 1, "verse": 2}
    assert record["peak"] == {"dictionary": [2.0], "verse": [2.0]}
    assert record["peak_of_all"] == [round(4 / 3, 4)]


def test_peak_is_max_over_mean() -> None:
    assert peak(np.array([[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]])).tolist() == [1.0, 4.0, 0.0]


def test_domains_get_equal_shares() -> None:
    lengths, domain = np.array([5, 5, 5, 2]), np.array([0, 0, 0, 1], np.uint8)
    assert choose_documents(lengths, domain, domains=2, tokens=12).tolist() == [0, 1, 3]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=40), st.integers(1, 200))
def test_shares_are_kept_to_within_a_document(documents: list[tuple[int, int]], tokens: int) -> None:
    lengths, domain = np.array([d[0] for d in documents]), np.array([d[1] for d in documents], np.uint8)
    chosen = choose_documents(lengths, domain, domains=3, tokens=tokens)
    assert (np.diff(chosen) > 0).all()
    taken = np.bincount(domain[chosen], weights=lengths[chosen], minlength=3)
    held = np.bincount(domain, weights=lengths, minlength=3)
    assert taken.sum() >= min(tokens, held.sum())
    assert taken.sum() < tokens + 3 * 9
    for one in range(3):
        if taken[one] < held[one]:
            assert (taken <= taken[one] + 9).all(), "nobody has much more than one that could give more"


def test_a_trace_holds_what_an_observer_of_one_document_sees(toy: Path) -> None:
    model, shards = export.load(toy / "moe"), Shards(toy / "shards", "heldout")
    traced = trace(model, shards, tokens=10**6, length=64, rows=5)
    lengths = np.minimum(np.diff(shards.starts), 64)
    assert (np.diff(traced.starts) == lengths).all()
    assert (traced.document_domain == shards.domain).all()
    for document in (0, 3, len(lengths) - 1):
        seen: list[torch.Tensor] = []
        text = torch.from_numpy(shards.tokens[shards.starts[document] :][: lengths[document]].astype("int64"))
        with torch.no_grad():
            model.hidden(text[None], observer=lambda _l, ids, _w, seen=seen: seen.append(ids))
        alone = torch.stack(seen, dim=1).sort(dim=2).values.numpy()
        assert (traced.ids[traced.starts[document] : traced.starts[document + 1]] == alone).all()
    with pytest.raises(PocketError, match="no experts"):
        trace(export.load(toy / "dense"), shards, tokens=10, length=64, rows=5)


def test_the_script_writes_trace_and_load(toy: Path, tmp_path: Path) -> None:
    options = ["--model", str(toy / "moe"), "--work", str(toy), "--out", str(tmp_path), "--device", "cpu"]
    assert script("trace").main([*options, "--only", "experts", "--tokens", "500"]) == 0
    traced, record = ExpertTrace.load(tmp_path / "experts.npz"), load_json(tmp_path / "load.json")
    assert len(traced.ids) == sum(record["tokens"].values()) >= 500
    assert np.array(record["counts"]["verse"]).tolist() == traced.counts()[1].tolist()
    weights = {"model": fingerprint(toy / "moe")}
    assert record["weights"] == load_json(tmp_path / "traced.json")["experts.npz"] == weights


def test_answers_json_and_csv_come_back(tmp_path: Path) -> None:
    said = {"domain": "verse", "prompt": "x", "text": "ö"}
    answer = Greedy(id="a", prompt_ids=(1, 2), output_ids=(3, 0), margin=0.5, router_margin=0.01, **said)
    save_greedy(tmp_path / "a.jsonl", [answer])
    assert load_greedy(tmp_path / "a.jsonl") == [answer]
    values = {"b": [1, 2], "a": {"c": [[1], {"d": 2}], "e": []}, "f": {}}
    save_json(tmp_path / "a.json", values)
    assert json.loads((tmp_path / "a.json").read_text()) == values == load_json(tmp_path / "a.json")
    save_csv(tmp_path / "a.csv", ("x", "y"), [(1, 2)])
    assert load_csv(tmp_path / "a.csv") == [{"x": "1", "y": "2"}]
    for load in (load_greedy, load_json, load_csv):
        with pytest.raises(PocketError, match="cannot be read"):
            load(tmp_path / "none")
