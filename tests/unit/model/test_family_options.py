"""Families that are flags of one spec: their keys and defaults, what of them is refused by name, and which tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import (
    BASE,
    CONFIGS,
    DOTS1,
    ERNIE,
    EXAONE,
    GLM4,
    GPT_OSS,
    HUNYUAN3,
    MINIMAX,
    OLMOE,
    QWEN3,
    SOLAR,
    ServingPath,
    save_model,
)

from services.errors import CheckpointError, UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.reference import ReferenceModel
from services.model.spec import ModelSpec, RouterSpec

TOKENS = [3, 90, 17, 44, 5, 61, 8, 8, 29, 70, 11]
WEIGHTS = "model.safetensors"


def spec_of(folder: Path, config: dict[str, Any], change: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a config that has ``change``, in which None leaves a key out."""
    merged = BASE | config | (change or {})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return load_spec(folder)


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    few: dict[str, Any] = dict.fromkeys((*GLM4, *MINIMAX, *DOTS1, *EXAONE, *HUNYUAN3, *ERNIE, *GPT_OSS))
    few |= {"num_key_value_heads": None, "intermediate_size": 48}
    glm4 = spec_of(tmp_path, {}, few | {"model_type": "glm4_moe", "num_hidden_layers": 3})
    assert glm4.router == RouterSpec(score="sigmoid", renormalise=True, bias=True, group_score="top2_sum")
    assert [layer.kind for layer in glm4.layers] == ["dense", "moe", "moe"]
    assert (glm4.num_experts, glm4.top_k, glm4.expert_ffn, glm4.shared_ffn) == (128, 8, 1408, 1408)
    assert (glm4.rope.dim, glm4.rms_eps, glm4.qk_norm, glm4.qkv_bias, glm4.mtp_layers) == (4, 1e-5, "none", False, 1)
    solar = spec_of(tmp_path, {}, few | {"model_type": "solar_open", "num_hidden_layers": 1})
    assert (solar.head_dim, solar.rope.theta, solar.rope.dim, solar.shared_ffn) == (128, 1e6, 0, 1280)
    dots1 = spec_of(tmp_path, DOTS1, {"n_shared_experts": None, "first_k_dense_replace": None})
    assert (dots1.shared_ffn, dots1.moe_layers, dots1.router.renormalise, dots1.rms_eps) == (0, (0, 1, 2), False, 1e-6)
    minimax = spec_of(tmp_path, {}, few | {"model_type": "minimax_m2", "num_hidden_layers": 1})
    assert (minimax.num_experts, minimax.top_k, minimax.head_dim, minimax.expert_ffn) == (256, 8, 128, 48)
    assert (minimax.rope.theta, minimax.rope.dim, minimax.rms_eps, minimax.mtp_layers) == (5e6, 0, 1e-6, 0)
    exaone = spec_of(tmp_path, {}, few | {"model_type": "exaone_moe", "num_hidden_layers": 5})
    assert [layer.window for layer in exaone.layers] == [4096, 4096, 4096, None, 4096]
    assert [layer.rotated for layer in exaone.layers] == [True, True, True, False, True]
    assert (exaone.router.scale, exaone.num_experts, exaone.shared_ffn) == (2.5, 64, 1024)
    hunyuan = spec_of(tmp_path, {}, few | {"model_type": "hy_v3", "num_hidden_layers": 2})
    assert (hunyuan.router.scale, hunyuan.num_experts, hunyuan.rope.theta) == (2.826, 192, 11_158_840.0)
    ernie = spec_of(tmp_path, {}, few | {"model_type": "ernie4_5_moe", "num_hidden_layers": 3})
    assert (ernie.num_experts, ernie.top_k, ernie.shared_ffn, ernie.tie_embeddings) == (64, 6, 3072, True)
    assert (ernie.router.score, ernie.rope.interleaved, ernie.moe_layers) == ("softmax", True, (1, 2))
    oss = spec_of(tmp_path, {}, few | {"model_type": "gpt_oss", "num_hidden_layers": 3})
    assert [layer.window for layer in oss.layers] == [128, None, 128]
    assert oss.router == RouterSpec(order="choose_first", logit_bias=True)
    assert (oss.num_experts, oss.top_k, oss.head_dim, oss.rms_eps) == (128, 4, 64, 1e-5)
    assert (oss.qkv_bias, oss.o_bias, oss.sinks, oss.expert_bias) == (True, True, True, True)
    assert (oss.rope.kind, oss.rope.theta, oss.rope.factor, oss.rope.truncate) == ("yarn", 150_000.0, 32.0, False)
    assert oss.dtype == "bfloat16", "published ones name none"


def test_a_part_of_a_head_is_rotated(tmp_path: Path) -> None:
    assert spec_of(tmp_path, GLM4).rope.dim == 12
    assert spec_of(tmp_path, GLM4, {"partial_rotary_factor": 1.0}).rope.dim == 0
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    assert spec_of(tmp_path, GLM4, inside | {"partial_rotary_factor": 0.75}).rope.dim == 6
    assert spec_of(tmp_path, MINIMAX).rope.dim == 10
    assert spec_of(tmp_path, MINIMAX, {"rotary_dim": 24}).rope.dim == 0


def test_fingerprints_follow_the_flags(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"n_group": 2},
        {"n_group": 2, "topk_group": 2},
        {"routed_scaling_factor": 2.0},
        {"partial_rotary_factor": 0.25},
        {"first_k_dense_replace": 2},
    ]
    found = {spec_of(tmp_path, GLM4, change).fingerprint for change in changes}
    assert len(found) == len(changes)
    layers = {"layer_types": ["full_attention"] * 4}
    assert spec_of(tmp_path, EXAONE, layers).fingerprint != spec_of(tmp_path, EXAONE).fingerprint


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "score": (GLM4, {"scoring_func": "softmax"}, ["scoring_func 'softmax'", "glm4_moe", "'sigmoid'"]),
    "dense_layers": (SOLAR, {"first_k_dense_replace": 1}, ["first_k_dense_replace 1", "solar_open", "Supported is 0"]),
    "norms": (SOLAR, {"use_qk_norm": True}, ["use_qk_norm True"]),
    "a_part": (SOLAR, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    "no_norms": (MINIMAX, {"use_qk_norm": False}, ["use_qk_norm False"]),
    "norms_by_head": (MINIMAX, {"qk_norm_type": "per_head"}, ["qk_norm_type 'per_head'", "'per_layer'"]),
    "linear_attention": (MINIMAX, {"attn_type_list": [0, 1, 1]}, ["attn_type_list [0, 1, 1]"]),
    "shared": (MINIMAX, {"shared_intermediate_size": 18}, ["shared_intermediate_size 18"]),
    "unbiased": (MINIMAX, {"use_routing_bias": False}, ["use_routing_bias False"]),
    "mlp_bias": (HUNYUAN3, {"mlp_bias": True}, ["mlp_bias True", "hy_v3"]),
    "bias": (ERNIE, {"use_bias": True}, ["use_bias True", "ernie4_5_moe"]),
    "compressed": (ERNIE, {"compression_ratio": 2.0}, ["compression_ratio 2.0"]),
    "norm_min": (ERNIE, {"moe_norm_min": 0.1}, ["moe_norm_min 0.1"]),
    "rope_by_layer": (
        QWEN3,
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
        ["full_attention", "one rotary embedding for all layers"],
    ),
    "near": (GLM4, {"model_type": "glm4moe"}, ['model_type "glm4moe"', 'The nearest is "glm4_moe"']),
    "activation": (GLM4, {"hidden_act": "gelu"}, ["gelu", "silu"]),
    "limit": (GPT_OSS, {"swiglu_limit": 10.0}, ["swiglu_limit 10.0", "gpt_oss", "7.0"]),
    "alpha": (GPT_OSS, {"swiglu_alpha": 1.5}, ["swiglu_alpha 1.5", "1.702"]),
}


@pytest.mark.parametrize(("config", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_options_that_are_not_implemented_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    spec_of(tmp_path, config)
    with pytest.raises(UnsupportedModel) as error:
        spec_of(tmp_path, config, change)
    assert all(word in str(error.value) for word in [*words, "config.json"])


def test_a_name_that_is_near_none_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as error:
        spec_of(tmp_path, GLM4, {"model_type": "whisper"})
    assert "nearest" not in str(error.value)
    assert "glm4_moe, glm4_moe_lite, gpt_oss" in str(error.value)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "groups": (GLM4, {"n_group": 3}, '8 experts do not divide into the 3 groups of "n_group"'),
    "groups_of_one": (GLM4, {"n_group": 8}, "8 groups of 8 experts have one each"),
    "too_many_groups": (GLM4, {"n_group": 2, "topk_group": 3}, '"topk_group" 3 is more than the 2 groups'),
    "too_few_to_choose": (GLM4, {"n_group": 4}, '"num_experts_per_tok" 3 is more than the 2 experts of "topk_group" 1'),
    "odd_part": (GLM4, {"partial_rotary_factor": 0.4}, "an even number of the 24 dimensions"),
    "no_part": (GLM4, {"partial_rotary_factor": 0.01}, "an even number of the 24 dimensions"),
    "more_than_all": (MINIMAX, {"rotary_dim": 48}, "an even number of the 24 dimensions"),
    "mtp_without_end": (GLM4, {"num_nextn_predict_layers": 10**9}, '"num_nextn_predict_layers" must be at most 64'),
    "layer_types": (DOTS1, {"layer_types": ["full_attention"]}, "3 times"),
    "mlp_layer_types": (HUNYUAN3, {"mlp_layer_types": ["dense", "moe", "moe"]}, '"dense" or "sparse"'),
    "experts": (DOTS1, {"n_routed_experts": None}, '"n_routed_experts" must be a whole number above 0, found nothing'),
    "chosen": (DOTS1, {"num_experts_per_tok": None}, '"num_experts_per_tok" must be a whole number above 0'),
    "chosen_of_ernie": (ERNIE, {"moe_k": 9}, "9 is more than the 8 experts"),
    "pattern": (EXAONE, {"sliding_window_pattern": "LLLG"}, '"sliding_window_pattern" must be a whole number'),
    "kinds_of_layers": (GPT_OSS, {"layer_types": ["chunked_attention"] * 4}, '"sliding_attention"'),
    "olmoe_heads": (OLMOE, {"head_dim": 16}, "such that 4 heads are the hidden size"),
}


@pytest.mark.parametrize(("config", "change", "words"), WRONG.values(), ids=WRONG)
def test_numbers_that_contradict_one_another_are_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    spec_of(tmp_path, config)
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, config, change)
    assert words in str(error.value)
    assert "config.json" in str(error.value)


def test_the_method_of_the_choice_may_stand_for_the_score(tmp_path: Path) -> None:
    assert spec_of(tmp_path, DOTS1, {"scoring_func": "noaux_tc"}) == spec_of(tmp_path, DOTS1)


def test_a_pattern_in_letters_stands_beside_its_list(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    spec = spec_of(tmp_path, EXAONE, {"sliding_window_pattern": "LG", "layer_types": types})
    assert [layer.window for layer in spec.layers] == [9, None, 9, None]


def logits(folder: Path) -> torch.Tensor:
    path = ServingPath(folder)
    run = path.start(TOKENS)
    path.step([(run, len(TOKENS))])
    return torch.cat(run.logits)


def change_tensors(folder: Path, added: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> None:
    tensors = load_file(folder / WEIGHTS) | added
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name not in without}, folder / WEIGHTS)


MTP_NAMES = {
    "glm4": ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.gate_proj.weight"],
    "hunyuan3": ["model.layers.3.eh_proj.weight"],
    "exaone": ["mtp.layers.0.self_attn.q_proj.weight"],
    "ernie": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
}


@pytest.mark.parametrize("name", MTP_NAMES)
def test_parts_that_predict_further_ahead_change_nothing(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, CONFIGS[name])
    before = logits(tmp_path)
    change_tensors(tmp_path, {tensor: torch.ones(3, 5) for tensor in MTP_NAMES[name]})
    assert torch.equal(logits(tmp_path), before)
    assert ReferenceModel.load(tmp_path).logits(TOKENS).isfinite().all()


def test_layers_behind_those_are_unexpected(tmp_path: Path) -> None:
    save_model(tmp_path, GLM4)
    change_tensors(tmp_path, {"model.layers.4.eh_proj.weight": torch.ones(3, 5)})
    with pytest.raises(CheckpointError, match=r'no place for 1 tensor \("model.layers.4.eh_proj.weight"\)'):
        opened(tmp_path)


def opened(folder: Path) -> None:
    with Checkpoint(folder, load_spec(folder)):
        pass


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        opened(folder)
    return str(error.value)


def test_missing_extra_and_contradicting_tensors_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, GLM4)
    bias, shared = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.shared_experts.up_proj.weight"
    kept = load_file(tmp_path / WEIGHTS)
    change_tensors(tmp_path, {}, without=(bias, shared))
    assert "lacks 2 tensors" in refused(tmp_path)
    assert f'"{bias}"' in refused(tmp_path)
    change_tensors(tmp_path, kept | {"model.layers.0.mlp.gate.weight": kept["model.layers.1.mlp.gate.weight"]})
    assert 'no place for 1 tensor ("model.layers.0.mlp.gate.weight")' in refused(tmp_path)
    change_tensors(tmp_path, {bias: torch.zeros(7)}, without=("model.layers.0.mlp.gate.weight",))
    assert f'tensor "{bias}" has shape [7], config.json calls for [8]' in refused(tmp_path)


def test_the_bias_decides_who_is_chosen_and_is_not_in_the_weights(tmp_path: Path) -> None:
    save_model(tmp_path, GLM4 | {"first_k_dense_replace": 0})
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    chosen: list[list[int]] = []
    for favourites in ((0, 1, 2), (5, 6, 7)):
        bias = torch.zeros(8)
        bias[list(favourites)] = 10.0
        change_tensors(tmp_path, {name.format(layer): bias for layer in range(3)})
        oracle = ReferenceModel.load(
            tmp_path, lambda _layer, expert_TK: chosen.extend(expert_TK.sort().values.tolist())
        )
        torch.testing.assert_close(logits(tmp_path), oracle.logits(TOKENS), atol=1e-5, rtol=1e-5)
        assert set(map(tuple, chosen)) == {favourites}
        chosen.clear()


def test_a_quantised_checkpoint_may_have_such_parts_and_name_them(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", GLM4 | {"moe_intermediate_size": 32})
    made = quantise(tmp_path / "plain", tmp_path, FORMATS["ct-int4-group"])
    config = json.loads((made.folder / "config.json").read_text())
    left = ["lm_head", "model.layers.3.eh_proj", "model.layers.3.shared_head.head"]
    config["quantization_config"]["ignore"] = left
    (made.folder / "config.json").write_text(json.dumps(config))
    packed = "model.layers.3.mlp.experts.0.up_proj.weight_packed"
    change_tensors(made.folder, {packed: torch.ones(3, 5, dtype=torch.int32)})
    torch.testing.assert_close(logits(made.folder), logits(made.reference), atol=1e-5, rtol=1e-5)
    left.append("model.layers.4.eh_proj")
    (made.folder / "config.json").write_text(json.dumps(config))
    assert 'leaves "model.layers.4.eh_proj" unquantised' in refused(made.folder)


def test_an_ordinary_layer_behind_the_last_is_no_such_part(tmp_path: Path) -> None:
    """num_hidden_layers is one too small: what predicts further ahead has tensors that no other layer has."""
    save_model(tmp_path, GLM4 | {"num_hidden_layers": 4})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    with (
        pytest.raises(CheckpointError, match=r'"num_hidden_layers" .* is 3, but the files hold .* model\.layers\.3'),
        Checkpoint(tmp_path, load_spec(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "change"),
    [(EXAONE, {}), (DOTS1, {"layer_types": ["sliding_attention"] * 3}), (GPT_OSS, {})],
    ids=["exaone", "dots1", "gpt-oss"],
)
def test_windows_that_are_null_are_refused(tmp_path: Path, config: dict[str, Any], change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | config | change | {"sliding_window": None}))
    with pytest.raises(CheckpointError, match='"sliding_window" must be a whole number above 0'):
        load_spec(tmp_path)


def test_tokens_that_end_sequences_are_the_familys_where_nothing_names_them(tmp_path: Path) -> None:
    absent = {"eos_token_id": None}
    assert spec_of(tmp_path, EXAONE, absent).eos_token_ids == (53,)
    assert spec_of(tmp_path, ERNIE, absent).eos_token_ids == (2,)
    assert spec_of(tmp_path, ERNIE).eos_token_ids == (7,)
    assert spec_of(tmp_path, GLM4, absent).eos_token_ids == ()
