"""Families with recurrent layers: their keys and defaults, what is refused by name, and which tensors are read."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.quantised_checkpoints import configure, quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import BASE, QWEN3_5, QWEN3_NEXT, save_model
from unit.model.test_family_options import TOKENS, WEIGHTS, change_tensors, logits, spec_of

from services.errors import CheckpointError, UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.names import dense_shapes
from services.model.reference import ReferenceModel
from services.model.spec import RecurrentSpec

EXACT = 1e-5
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
LAYER = "model.layers.0.linear_attn"


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    few: dict[str, Any] = dict.fromkeys(QWEN3_NEXT) | {"num_hidden_layers": 8, "num_key_value_heads": 2}
    spec = spec_of(tmp_path, {}, few | {"model_type": "qwen3_next"})
    usual = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "conv": 4}
    assert spec.recurrent == RecurrentSpec(**usual, by_head=True)
    assert spec.recurrent_layers == (0, 1, 2, 4, 5, 6)
    assert (spec.num_experts, spec.top_k, spec.expert_ffn, spec.shared_ffn) == (512, 10, 512, 512)
    assert (spec.head_dim, spec.rope.dim, spec.rms_eps, spec.router.renormalise) == (256, 64, 1e-6, True)
    assert (spec.shared_gated, spec.output_gate, spec.centred_norms, spec.mtp_layers) == (True, True, True, 1)
    after = spec_of(tmp_path, {}, few | {"model_type": "qwen3_5_moe_text"})
    assert after.recurrent == RecurrentSpec(**usual, by_head=False)
    assert (after.num_experts, after.top_k, after.moe_layers) == (256, 8, tuple(range(8)))


def test_bytes_of_pages_and_states() -> None:
    """Those of Qwen3-Next-80B-A3B: 36 of 48 layers have a state of 32 matrices of 128 x 128."""
    recurrent = RecurrentSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4, by_head=True)
    assert recurrent.channels == 8192
    assert recurrent.state_elements == 3 * 8192 + 32 * 128 * 128


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights as they are": (QWEN3_5, {"norm_topk_prob": False}, "norm_topk_prob False"),
    "no gate": (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate False"),
    "activation": (QWEN3_NEXT, {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
    "rope by layer": (
        QWEN3_NEXT,
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "linear_attention": {"rope_theta": 1e4}}},
        "one rotary embedding for all layers",
    ),
}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": (QWEN3_NEXT, {"linear_num_value_heads": 5}, '"linear_num_value_heads" must be a multiple of the 2'),
    "other layers": (QWEN3_NEXT, {"layer_types": ["full_attention", "mamba", "full_attention"]}, "linear_attention"),
    "too few layers": (QWEN3_NEXT, {"layer_types": ["full_attention"]}, "3 times"),
    "no attention": (QWEN3_NEXT, {"layer_types": ["linear_attention"] * 3}, "none of the 3 layers has attention"),
    "never attention": (QWEN3_NEXT, {"layer_types": None, "full_attention_interval": 9}, "none of the 3 layers"),
    "no convolution": (QWEN3_NEXT, {"linear_conv_kernel_dim": 0}, '"linear_conv_kernel_dim" must be'),
    "convolution without end": (QWEN3_NEXT, {"linear_conv_kernel_dim": 10**6}, "at most 64"),
    "no dimension": (QWEN3_NEXT, {"linear_key_head_dim": -1}, '"linear_key_head_dim" must be'),
    "text part": (QWEN3_5, {"model_type": "qwen3_5_moe", "text_config": [1]}, '"text_config" must be an object'),
}


@pytest.mark.parametrize(("config", "change", "words"), [*REFUSED.values(), *WRONG.values()], ids=[*REFUSED, *WRONG])
def test_what_layers_do_not_have_and_what_contradicts_is_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    spec_of(tmp_path, config)
    with pytest.raises((UnsupportedModel, CheckpointError)) as error:
        spec_of(tmp_path, config, change)
    assert isinstance(error.value, UnsupportedModel) == (change in [one for _, one, _ in REFUSED.values()])
    assert words in str(error.value)
    assert "config.json" in str(error.value)


def test_fingerprints_follow_the_flags(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"linear_key_head_dim": 12},
        {"linear_conv_kernel_dim": 2},
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        {"model_type": "qwen3_5_moe_text"},
    ]
    found = {spec_of(tmp_path, QWEN3_NEXT, change).fingerprint for change in changes}
    assert len(found) == len(changes)


@pytest.mark.parametrize("config", [QWEN3_NEXT, QWEN3_5], ids=lambda config: config["model_type"])
def test_parts_that_predict_further_ahead_change_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    save_model(tmp_path, config)
    before = logits(tmp_path)
    change_tensors(tmp_path, dict.fromkeys(("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"), torch.ones(2, 2)))
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize("config", [QWEN3_NEXT, QWEN3_5], ids=lambda config: config["model_type"])
def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    save_model(tmp_path, config)
    whole = load_file(tmp_path / WEIGHTS)
    names = [name for name in whole if name.startswith(LAYER)]
    assert len(names) == (7 if config is QWEN3_NEXT else 9)
    for name in names:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match=name):
            Checkpoint(tmp_path, load_spec(tmp_path))
        save_file(whole | {name: torch.ones(3, 3, 3)}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match=rf'{name}" has shape \[3, 3, 3\]'):
            Checkpoint(tmp_path, load_spec(tmp_path))


def test_projections_of_the_other_family_have_no_place(tmp_path: Path) -> None:
    save_model(tmp_path, QWEN3_NEXT)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_5_moe_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks .*in_proj_qkv\.weight"):
        Checkpoint(tmp_path, load_spec(tmp_path))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint with a part for images, as transformers saves it, and its logits of :data:`TOKENS`."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    folder = tmp_path_factory.mktemp("multimodal")
    torch.manual_seed(4)
    text = {key: value for key, value in (BASE | QWEN3_5).items() if key != "model_type"}
    vision = VISION | {"num_position_embeddings": 16, "patch_size": 4}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))
    for parameter in model.float().eval().parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.tensor([TOKENS])).logits[0]


def test_of_a_multimodal_checkpoint_the_text_part_is_served(
    multimodal: tuple[Path, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    folder, wanted_TV = multimodal
    with caplog.at_level(logging.INFO):
        torch.testing.assert_close(logits(folder), wanted_TV, atol=EXACT, rtol=EXACT)
    assert "tensors of images (model.visual.) are left out: only text is served" in caplog.text
    torch.testing.assert_close(ReferenceModel.load(folder).logits(TOKENS), wanted_TV, atol=EXACT, rtol=EXACT)
    spec = load_spec(folder)
    assert (spec.family, spec.eos_token_ids, spec.vocab_size) == ("qwen3_5_moe", (7,), 96)


def with_experts_of_a_layer_in_one(folder: Path, other: Path) -> dict[str, torch.Tensor]:
    """Copy ``folder`` as published checkpoints are: the experts of a layer lie in two tensors. Returns its tensors."""
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / WEIGHTS)
    for layer in range(3):
        begin = f"model.language_model.layers.{layer}.mlp.experts"
        taken = [
            [tensors.pop(f"{begin}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(8)
        ]
        tensors[f"{begin}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in taken])
        tensors[f"{begin}.down_proj"] = torch.stack([down for _, _, down in taken])
    save_file(tensors, other / WEIGHTS)
    return tensors


def test_experts_of_a_layer_may_lie_in_one_tensor(multimodal: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = multimodal
    tensors = with_experts_of_a_layer_in_one(folder, tmp_path)
    assert torch.equal(logits(tmp_path), logits(folder))
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name][:, :-1].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks 16 tensors"):
        Checkpoint(tmp_path, load_spec(tmp_path))


def test_a_quantised_multimodal_checkpoint(multimodal: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """In FP8 as published: the list of what is left as it is has the names that files have, of images as well."""
    folder, _ = multimodal
    part = "model.language_model.layers.0."
    left = [f"{part}linear_attn.{name}" for name in ("conv1d", "in_proj_a", "in_proj_b")]
    left += ["lm_head", "model.language_model.embed_tokens", f"{part}mlp.gate", f"{part}mlp.shared_expert_gate"]
    images = {name.removesuffix(".weight") for name in load_file(folder / WEIGHTS) if name.startswith("model.visual.")}
    config = FORMATS["fp8-block"].config | {"modules_to_not_convert": [*left, *sorted(images), "mtp.fc"]}
    skipped = (*left, *images)
    made = quantise(folder, tmp_path, replace(FORMATS["fp8-block"], config=config, left=skipped))
    assert f"{part}linear_attn.in_proj_qkv.weight" in made.quantised
    expected_TV = ReferenceModel.load(made.reference).logits(TOKENS)
    torch.testing.assert_close(logits(made.folder), expected_TV, atol=EXACT, rtol=EXACT)
    wrong = {"modules_to_not_convert": [*left, f"{part}linear_attn.in_proj"]}
    configure(made.folder, FORMATS["fp8-block"].config | wrong)
    with pytest.raises(CheckpointError, match=r'leaves "model.language_model.layers.0.linear_attn.in_proj" unquant'):
        Checkpoint(made.folder, load_spec(made.folder))


def test_names_of_the_text_part_alone_are_no_others(tmp_path: Path) -> None:
    """What is saved without images has plain names, and no part of another one has a place there."""
    save_model(tmp_path, QWEN3_5)
    assert set(dense_shapes(load_spec(tmp_path))) < set(load_file(tmp_path / WEIGHTS))
    change_tensors(tmp_path, {"model.visual.patch_embed.proj.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"no place for .*model\.visual"):
        Checkpoint(tmp_path, load_spec(tmp_path))
