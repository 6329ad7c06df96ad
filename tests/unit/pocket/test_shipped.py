"""The model in the box: hubs' tools load it, its logits are the oracle's, and it is as small as promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from testkit.pocket_evidence import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from pocket_moe.records import ExpertTrace, Greedy, load_greedy
from services.model.reference import ReferenceModel

EXAMPLE = ROOT / "examples/pocket-moe"
MODEL = EXAMPLE / "model"
SPECULATORS = sorted((EXAMPLE / "speculators").iterdir())
MEGABYTE = 1_000_000


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def answers() -> list[Greedy]:
    return load_greedy(EXAMPLE / "records/greedy.jsonl")


def test_transformers_and_the_oracle_compute_the_same_logits(answers: list[Greedy]) -> None:
    """Logits reach 27, where a unit in the last place is 2e-6: transformers' own attentions are 1.1e-5 apart."""
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    oracle = ReferenceModel.load(MODEL)
    for answer in answers[::20]:
        ids = [*answer.prompt_ids, *answer.output_ids]
        with torch.no_grad():
            logits_TV = theirs(torch.tensor([ids])).logits[0]
        difference = float((logits_TV - oracle.logits(ids)).abs().max())
        assert difference < 1e-5 * max(1.0, float(logits_TV.abs().max()))
        assert difference < 3e-5


def test_the_tokenizer_is_the_one_that_the_records_were_made_with(answers: list[Greedy]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for answer in answers:
        assert tuple(tokenizer(answer.prompt).input_ids) == answer.prompt_ids
        assert tokenizer.decode(answer.output_ids, skip_special_tokens=True) == answer.text


def test_a_chat_message_that_is_a_term_is_looked_up() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "user", "content": "lighthouse"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "define: lighthouse\n"


@pytest.mark.parametrize("folder", SPECULATORS, ids=lambda folder: folder.name)
def test_speculators_are_small_and_speak_the_same_tokens(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (folder / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert weights(folder) <= 3 * MEGABYTE


def test_weights_and_trace_are_as_large_as_promised() -> None:
    assert len(SPECULATORS) >= 2
    assert weights(MODEL) <= 22 * MEGABYTE
    assert weights(EXAMPLE) <= 32 * MEGABYTE
    trace = ExpertTrace.load(EXAMPLE / "records/experts.npz")
    assert len(trace.ids) >= 200_000
    assert trace.ids.shape[1:] == (5, 4)
    assert (trace.counts().sum(axis=(1, 2)) > 0).all()
