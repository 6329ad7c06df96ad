"""What a draft model has to be for a served one; every other one is refused with what to set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.errors import CheckpointError, ConfigError
from services.model.draft_spec import check_context, draft_spec
from services.model.load_spec import load_spec

POCKET = Path(__file__).parents[3] / "examples/pocket-moe"
SERVED = POCKET / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "draft"
    shutil.copytree(POCKET / "speculators/0", copy)
    return copy


def _changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def _refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        draft_spec(folder, load_spec(SERVED), SERVED)
    return str(error.value)


@pytest.mark.parametrize("number", [0, 1])
def test_the_pocket_models_speculators_draft_for_it(number: int) -> None:
    spec = draft_spec(POCKET / "speculators" / str(number), load_spec(SERVED), SERVED)
    assert (spec.family, spec.moe_layers, spec.num_experts) == ("llama", (), 0)


def test_a_model_with_experts_drafts_as_well() -> None:
    assert draft_spec(SERVED, load_spec(SERVED), SERVED).moe_layers


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'}" in _refusal(tmp_path / "nowhere")
    assert "is not a folder" in _refusal(tmp_path / "nowhere")
    assert "has no config.json" in _refusal(tmp_path)


def test_another_size_of_vocabulary_is_refused(folder: Path) -> None:
    said = _refusal(_changed(folder, vocab_size=8000))
    assert "has 8,000 tokens" in said
    assert "8,192" in said
    assert "--speculative-config" in said


def test_another_tokenizer_is_refused_by_the_first_token_that_differs(folder: Path) -> None:
    """The same one may lie there, too."""
    shutil.copy(SERVED / "tokenizer.json", folder)
    draft_spec(folder, load_spec(SERVED), SERVED)
    tokenizer = json.loads((SERVED / "tokenizer.json").read_text())
    vocab = {token: word for word, token in tokenizer["model"]["vocab"].items()}
    words = tokenizer["model"]["vocab"]
    words[vocab[500]], words[vocab[700]] = 700, 500
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = _refusal(folder)
    assert "has another tokenizer: token 500 is" in said
    assert repr(vocab[500]) in said
    assert repr(vocab[700]) in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 7}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_file_that_is_no_tokenizer_is_named(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        draft_spec(folder, load_spec(SERVED), SERVED)


def test_a_context_that_is_too_short_says_what_to_set(folder: Path) -> None:
    spec = draft_spec(_changed(folder, max_position_embeddings=512), load_spec(SERVED), SERVED)
    check_context(spec, folder, 512)
    with pytest.raises(ConfigError, match=r"context of 512 tokens.*up to 1,024 are served.*--max-model-len 512"):
        check_context(spec, folder, 1024)
