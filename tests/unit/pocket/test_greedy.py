"""Prompts that nobody chose, and the reference's answers to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from testkit.pocket.evidence import WORDS, script
from torch import Tensor

from pocket_moe.errors import PocketError
from pocket_moe.measure.greedy import Answerer, Continuation, clear_answers, continue_greedily
from pocket_moe.measure.samples import Prompt, cut_words, headwords, load_samples, prefixes
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.records import Greedy, load_greedy, load_json, save_json
from services.model.reference import ReferenceModel


def test_the_best_token_is_taken_until_the_end() -> None:
    logits = {0: [0.0, 1.0, 3.0], 2: [0.0, 2.5, 2.0], 1: [4.0, 0.0, 3.75]}

    def step(ids: list[int]) -> tuple[Tensor, float]:
        return torch.tensor(logits[ids[-1]]), 0.1 * len(ids)

    found = continue_greedily(step, [0], most=9, eos_id=0)
    assert found.ids == (2, 1, 0)
    assert found.margin == 0.25
    assert found.router_margin == pytest.approx(0.1)
    assert continue_greedily(step, [0], most=2, eos_id=0).ids == (2, 1)


def test_close_choices_are_not_clear() -> None:
    assert Continuation(ids=(1,), margin=1e-3, router_margin=1e-3).clear
    assert not Continuation(ids=(1,), margin=1e-5, router_margin=1e-3).clear
    assert not Continuation(ids=(1,), margin=1e-3, router_margin=1e-6).clear


def test_prompts_without_a_clear_answer_are_passed_over(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answerer, prompts = Answerer(toy / "moe", most=3), headwords(toy / "text", "heldout", 0)
    plain = answerer.answer

    def sometimes_close(prompt: Prompt) -> tuple[Greedy, Continuation]:
        greedy, found = plain(prompt)
        return greedy, dataclasses.replace(found, margin=0.0 if prompt in prompts[1:3] else 1.0)

    monkeypatch.setattr(answerer, "answer", sometimes_close)
    kept = clear_answers(answerer, prompts, 3)
    assert [answer.prompt for answer in kept] == [prompts[index].text for index in (0, 3, 4)]


def test_answers_are_transformers_answers(toy: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(toy / "moe", dtype=torch.float32)
    answerer = Answerer(toy / "moe", most=12)
    answers = list(clear_answers(answerer, headwords(toy / "text", "heldout", 0), 3))
    assert len(answers) == 3
    for answer in answers:
        prompt = torch.tensor([answer.prompt_ids])
        output = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=3)
        assert output[0, len(answer.prompt_ids) :].tolist() == list(answer.output_ids)


def test_the_script_records_what_the_reference_says(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(toy / "moe"), "--work", str(toy), "--out", str(tmp_path)]
    script_module = script("trace")
    options += ["--only", "greedy", "samples", "demo", "logits", "--prompts", "8", "--new", "6", "--sample-new", "6"]
    monkeypatch.setattr(script_module, "DEMO", "beacon")
    save_json(tmp_path / "traced.json", {"experts.npz": {"model": "a"}, "greedy.jsonl": {"model": "b"}})
    assert script_module.main(options) == 0
    weights = {"model": fingerprint(toy / "moe")}
    notes = {"experts.npz": {"model": "a"}, "greedy.jsonl": weights}
    notes |= {"samples.jsonl": weights, "demo.jsonl": weights}
    assert load_json(tmp_path / "traced.json") == notes
    answers = load_greedy(tmp_path / "greedy.jsonl")
    assert [answer.id.split("/")[0] for answer in answers] == ["heldout"] * 2 + ["known"] * 2 + ["prefix"] * 4
    oracle = ReferenceModel.load(toy / "moe")
    for answer in answers:
        ids = [*answer.prompt_ids, *answer.output_ids]
        picks = oracle.logits(ids)[len(answer.prompt_ids) - 1 : -1].argmax(1).tolist()
        assert picks == list(answer.output_ids)
        assert answer.margin >= 1e-4
    samples = load_samples(tmp_path / "samples.jsonl")
    assert [sample.kind for sample in samples] == ["heldout"] * 8 + ["known"] * 8
    assert all(sample.expected.startswith("What a ") for sample in samples)
    (demo,) = load_samples(tmp_path / "demo.jsonl")
    assert (demo.prompt, demo.expected) == ("define: beacon\n", "What a beacon is.\nAnd more of it.")
    record = load_json(tmp_path / "logits.json")
    assert record["weights"] == weights
    assert record["answers"] == record["within_1e-5"] == 8
    assert 0 < record["largest_difference"] <= 1e-5
    monkeypatch.setattr(script_module, "DEMO", "nowhere")
    assert script_module.main([*options[:6], "--only", "demo"]) == 1
    assert 'has no "nowhere"' in capsys.readouterr().err


def test_headwords_are_drawn_by_the_seed_alone(toy: Path) -> None:
    drawn = headwords(toy / "text", "heldout", 0)
    assert sorted(prompt.text for prompt in drawn) == sorted(f"define: {word}\n" for word in WORDS[4:])
    assert drawn == headwords(toy / "text", "heldout", 0) != headwords(toy / "text", "heldout", 1)
    assert drawn[0].expected.endswith("\nAnd more of it.")


def test_prefixes_are_whole_words_of_other_domains(toy: Path) -> None:
    drawn = prefixes(toy / "text", 0)
    assert {prompt.domain for prompt in drawn} == {"verse"}
    for prompt in drawn:
        assert 8 <= len(prompt.text.split()) <= 40
        assert prompt.expected.startswith(" ")
    assert cut_words("In the beginning God", 2) == "In the"
    assert cut_words("In the", 2) is None


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PocketError, match="cannot be read"):
        Answerer(tmp_path, most=4)
    with pytest.raises(PocketError, match="cannot be read"):
        headwords(tmp_path, "heldout", 0)
    with pytest.raises(PocketError, match="cannot be read"):
        load_samples(tmp_path / "none.jsonl")
