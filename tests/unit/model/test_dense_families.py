"""Families without experts: equal to transformers' models, but for drafts alone: none is served by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import LLAMA3_ROPE, YARN_ROPE, ServingPath, save_model

from services.errors import UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.names import dense_shapes
from services.model.reference import ReferenceModel

EXACT = 1e-5
LLAMA: dict[str, Any] = {"model_type": "llama"}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CONFIGS = {
    "llama": LLAMA,
    "llama-3": LLAMA | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 24},
    "llama-bias": LLAMA | {"attention_bias": True, "num_key_value_heads": 4},
    "qwen3": QWEN3,
    "qwen3-window": QWEN3 | WINDOW | {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3-yarn": QWEN3 | {"rope_parameters": YARN_ROPE, "layer_types": ["full_attention"] * 3},
}


@pytest.fixture(scope="module", params=CONFIGS)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(folder, CONFIGS[request.param])


@torch.no_grad()
def test_the_serving_path_and_the_oracle_equal_transformers(dense: tuple[Path, Any]) -> None:
    """A prompt of which no window holds all, in three pieces, the last of one token."""
    folder, model = dense
    tokens = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    expected_TV = model(torch.tensor([tokens])).logits[0]
    path = ServingPath(folder, drafts=True)
    assert not path.spec.moe_layers
    run = path.start(tokens)
    for length in (30, 19, 1):
        path.step([(run, length)])
    torch.testing.assert_close(torch.cat(run.logits), expected_TV, atol=EXACT, rtol=EXACT)
    with Checkpoint(folder, path.spec) as checkpoint:
        oracle = ReferenceModel(path.spec, {name: checkpoint.read(name) for name in dense_shapes(path.spec)})
    torch.testing.assert_close(oracle.logits(tokens), expected_TV, atol=EXACT, rtol=EXACT)


def test_one_is_not_served_by_itself(dense: tuple[Path, Any]) -> None:
    folder, model = dense
    with pytest.raises(UnsupportedModel) as error:
        load_spec(folder)
    said = str(error.value)
    assert f'model_type "{model.config.model_type}"' in said
    assert "a dense model where experts are asked for" in said
    assert "--speculative-config" in said


def test_windows_begin_where_the_config_says(tmp_path: Path) -> None:
    """transformers writes ``layer_types``, which older files have not."""
    save_model(tmp_path, QWEN3 | WINDOW)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("layer_types")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [layer.window for layer in load_spec(tmp_path, drafts=True).layers] == [None, 9, 9]


@pytest.mark.parametrize("option", [{"mlp_bias": True}, {"hidden_act": "gelu"}], ids=str)
def test_what_is_not_supported_is_named(tmp_path: Path, option: dict[str, Any]) -> None:
    save_model(tmp_path, LLAMA | option)
    with pytest.raises(UnsupportedModel, match=next(iter(option))):
        load_spec(tmp_path, drafts=True)
