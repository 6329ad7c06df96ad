"""config.json -> ModelSpec: the families' keys and defaults, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.models.tiny_models import BASE, LLAMA3_ROPE, MIXTRAL, OLMOE, QWEN2, QWEN3, YARN_ROPE

from services.errors import CheckpointError, UnsupportedModel
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec


def write_config(folder: Path, *configs: dict[str, Any], without: tuple[str, ...] = ()) -> Path:
    merged = BASE.copy()
    for config in configs:
        merged |= config
    kept = {key: value for key, value in merged.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def spec_of(folder: Path, *configs: dict[str, Any], without: tuple[str, ...] = ()) -> ModelSpec:
    return load_spec(write_config(folder, *configs, without=without))


def test_qwen3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN3, {"norm_topk_prob": True, "dtype": "bfloat16", "rope_theta": 5e5})
    assert (spec.family, spec.dtype, spec.qk_norm, spec.head_dim) == ("qwen3_moe", "bfloat16", "head", 16)
    assert spec.router.renormalise
    assert spec.rope.theta == 5e5
    assert spec.moe_layers == (0, 1, 2)
    assert (spec.q_size, spec.kv_size) == (64, 32)


def test_qwen3_calls_its_experts_by_either_name(tmp_path: Path) -> None:
    assert spec_of(tmp_path, QWEN3, {"num_local_experts": 8}, without=("num_experts",)).num_experts == 8


def test_sparse_step_and_dense_layers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN3, {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.kind for layer in spec.layers] == ["dense", "moe", "dense", "dense", "dense", "moe"]
    assert spec.dense_ffn == 48


def test_qwen2_windows(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 5, "max_window_layers": 3}
    spec = spec_of(tmp_path, QWEN2, window)
    assert [layer.window for layer in spec.layers] == [9, None, 9, None, None]
    types = ["full_attention"] * 4 + ["sliding_attention"]
    assert [layer.window for layer in spec_of(tmp_path, QWEN2, window, {"layer_types": types}).layers][4] == 9
    assert {layer.window for layer in spec_of(tmp_path, QWEN2, {"sliding_window": 9}).layers} == {None}


def test_qwen3_windows(tmp_path: Path) -> None:
    window = {"use_sliding_window": True}
    assert {layer.window for layer in spec_of(tmp_path, QWEN3, window).layers} == {4096}
    assert {layer.window for layer in spec_of(tmp_path, QWEN3, window, {"sliding_window": 9}).layers} == {9}
    assert {layer.window for layer in spec_of(tmp_path, QWEN3, window, {"sliding_window": None}).layers} == {None}
    assert {layer.window for layer in spec_of(tmp_path, QWEN3, {"sliding_window": 9}).layers} == {None}


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    bare = (
        "num_local_experts",
        "num_experts_per_tok",
        "num_experts",
        "num_key_value_heads",
        "shared_expert_intermediate_size",
    )
    mixtral = spec_of(tmp_path, MIXTRAL, without=bare)
    assert (mixtral.num_experts, mixtral.top_k, mixtral.num_kv_heads) == (8, 2, 4)
    assert (mixtral.rms_eps, mixtral.rope.theta) == (1e-5, 1e6)
    assert (mixtral.dtype, mixtral.tie_embeddings, mixtral.qkv_bias) == ("float32", False, False)
    qwen2 = spec_of(tmp_path, QWEN2, without=bare)
    assert (qwen2.num_experts, qwen2.top_k, qwen2.shared_ffn, qwen2.qkv_bias) == (60, 4, 5632, True)
    assert (qwen2.rms_eps, qwen2.rope.theta) == (1e-6, 1e4)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert spec_of(tmp_path, OLMOE).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert spec_of(tmp_path, OLMOE).eos_token_ids == (3, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.8}))
    assert spec_of(tmp_path, OLMOE, {"eos_token_id": [7, 50279]}).eos_token_ids == (7,), "50279 is no token"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_in_both_layouts(tmp_path: Path, key: str) -> None:
    rope = spec_of(tmp_path, MIXTRAL, {key: LLAMA3_ROPE}).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 500.0, 4.0, 64)


def test_old_rope_scaling_keeps_theta_outside(tmp_path: Path) -> None:
    rope = spec_of(tmp_path, MIXTRAL, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 777.0}).rope
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 777.0, 2.0)


def test_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    first = spec_of(tmp_path, QWEN3).fingerprint
    assert first == "05521ef50bd648376885248ced21d7ea", "members of the release before claim the same"
    assert first == spec_of(tmp_path, QWEN3, {"initializer_range": 0.5, "use_cache": False}).fingerprint
    assert first != spec_of(tmp_path, QWEN3, {"norm_topk_prob": True}).fingerprint
    (tmp_path / "model.safetensors").write_bytes(b"0123")
    second = spec_of(tmp_path, QWEN3).fingerprint
    assert second == "08337b04c72359cb0a7b8d52de0eeb5f"
    (tmp_path / "model.safetensors").write_bytes(b"01234")
    third = spec_of(tmp_path, QWEN3).fingerprint
    assert len({first, second, third}) == 3


def test_fingerprint_follows_how_the_files_are_to_be_read(tmp_path: Path) -> None:
    """GPTQ's two versions have the same files and mean other weights."""
    found = {
        spec_of(tmp_path, QWEN3, {"quantization_config": {"quant_method": "gptq", "bits": 4, **more}}).fingerprint
        for more in ({}, {"checkpoint_format": "gptq_v2"}, {"group_size": 64}, {"lm_head": True})
    }
    assert len(found | {spec_of(tmp_path, QWEN3).fingerprint}) == 5
    assert spec_of(tmp_path, QWEN3, {"quantization_config": None}).fingerprint == spec_of(tmp_path, QWEN3).fingerprint


UNSUPPORTED = {
    "model_type": ({"model_type": "llama"}, ["llama", "mixtral, olmoe, qwen2_moe, qwen3_5_moe"]),
    "quantized": ({"quantization_config": {"bits": 4}}, ["without a quant_method", "quantization_config", "bfloat16"]),
    "quant_method": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ['quant_method "bitsandbytes"', "auto-round, awq, compressed-tensors, fp8, gptq, mxfp4"],
    ),
    "activation": ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    "dtype": ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "float32, bfloat16, float16"]),
    "rope": ({"rope_parameters": {"rope_type": "longrope"}}, ["longrope", "yarn"]),
    "partial_rope": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
}


@pytest.mark.parametrize(("change", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_names_what_is_supported(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as error:
        spec_of(tmp_path, QWEN3, change)
    assert all(word in str(error.value) for word in [*words, "config.json"])


WRONG = {
    "no_model_type": ({"model_type": None}, "model_type"),
    "text_for_number": ({"hidden_size": "wide"}, "\"hidden_size\" must be a whole number above 0, found 'wide'"),
    "flag_for_number": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "negative": ({"vocab_size": -1}, "vocab_size"),
    "missing": ({"hidden_size": None}, '"hidden_size" must be a whole number above 0, found nothing'),
    "number_for_flag": ({"norm_topk_prob": 1}, "norm_topk_prob"),
    "heads": ({"num_attention_heads": 5, "head_dim": None}, "not divisible"),
    "kv_heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd_head": ({"head_dim": 15}, "odd"),
    "top_k": ({"num_experts_per_tok": 9}, "8 experts"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "rope_is_no_object": ({"rope_parameters": [1]}, "rope_parameters"),
    "rope_lacks_factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    "beyond_floats": ({"rms_norm_eps": 10**400}, '"rms_norm_eps" must be a number above 0'),
    "beyond_counts": ({"hidden_size": 2**40}, '"hidden_size" must be at most'),
    "layers_without_end": ({"num_hidden_layers": 10**9}, '"num_hidden_layers" must be at most'),
    "experts_without_end": ({"num_experts": 10**9}, "1000000000 experts"),
    "yarn_of_1": ({"rope_parameters": YARN_ROPE | {"rope_theta": 1}}, '"rope_theta" must be more than 1'),
    "llama3_without_a_band": ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1}}, "high_freq_factor"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, QWEN3, change)
    assert words in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "granitemoe", "num_local_experts": 32}, False),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, False),
    ],
)
def test_a_dense_model_is_called_so(tmp_path: Path, config: dict[str, Any], dense: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        load_spec(tmp_path)
    assert ("not a Mixture-of-Experts model" in str(error.value)) is dense


def test_olmoe_norm_needs_the_whole_width(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="head_dim"):
        spec_of(tmp_path, OLMOE, {"head_dim": 16})


def test_folder_and_file_problems(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder.*--model"):
        load_spec(tmp_path / "nowhere")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"GGUF is not supported.*safetensors"):
        load_spec(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"has no config.json.*--model"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be read as JSON.*again"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_spec(tmp_path)
