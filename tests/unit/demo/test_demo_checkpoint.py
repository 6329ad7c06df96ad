"""The demo checkpoint: in the hub's layout, the same every time, and at home in transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from services.demo import checkpoint
from services.demo.checkpoint import make_demo_model
from services.demo.tokenizer import VOCAB_SIZE
from services.errors import ConfigError
from services.model.load_spec import load_spec

_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "model"
    make_demo_model(directory)
    return directory


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_it_is_the_same_every_time(model: Path, tmp_path: Path) -> None:
    make_demo_model(tmp_path / "again")
    assert _digests(tmp_path / "again") == _digests(model)
    assert set(_digests(model)) == _FILES


def test_transformers_loads_every_tensor_and_generates(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model)
    output = loaded.generate(**tokenizer("Return the", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("Return the")
    assert output.shape[1] > len(tokenizer("Return the")["input_ids"])


def test_the_chat_template_frames_turns(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", ["", "plain words", "  def f():\n\treturn 'é漢字🙂'\r\n", "\x00\x07"])
def test_the_tokenizer_keeps_every_byte(model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    words = "Return the name of the current module as a string."
    assert len(tokenizer.encode(words).ids) < len(words) / 3, "it has learnt words"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_server_supports_it(model: Path) -> None:
    spec = load_spec(model)
    assert (spec.family, spec.vocab_size, spec.num_experts) == ("qwen3_moe", VOCAB_SIZE, 16)
    assert set(spec.eos_token_ids) == set(json.loads((model / "generation_config.json").read_text())["eos_token_id"])


def test_other_types(tmp_path: Path) -> None:
    make_demo_model(tmp_path / "half", "bfloat16")
    assert load_spec(tmp_path / "half").dtype == "bfloat16"
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 7e6


def test_nothing_is_overwritten_and_nothing_left_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_demo_model(tmp_path / "mine")

    def fail(directory: Path, _: str) -> None:
        (directory / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
