"""Linear layers outside of experts held as the checkpoint has them: same values, fused, counted, refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from testkit.models.checkpoints import FAMILIES, save_checkpoint
from testkit.models.engines import ask, run, tokens
from testkit.models.oracles import oracles_answers
from testkit.models.quantised_checkpoints import WEIGHTS, Quantised, change, quantise
from testkit.models.quantisers import FORMATS, Format, awq, compressed, fp8_block, gptq
from testkit.models.quantisers import int_config as ct

from moe_kernels import QuantisedWeight, dequantize_experts, quantised_linear
from services.attention.setup.build import build
from services.config import DenseFormat, load_settings
from services.errors import CheckpointError, ConfigError
from services.model.checkpoint import Checkpoint
from services.model.held_linears import Linear, dense_bytes, held_linears, linears, linears_kept_on_cpu
from services.model.load_spec import load_spec
from services.model.names import LM_HEAD, dense_shapes
from services.model.sleep import RememberedWeights, tensors_in
from services.model.sources import promised_kinds
from services.model.spec import ModelSpec
from services.model.weight_source import FromCheckpoint, RandomWeights
from services.model.weights import DenseWeights, load_dense
from services.model.weights_sample import with_weights

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 384,
    "num_experts": 2,
    "mlp_only_layers": [1],
}
"""Layer 0 has experts and a shared one, layer 1 one network. All sizes hold blocks of 128 x 128."""
_GPTQ = FORMATS["gptq-int4"].config
STORED: dict[str, tuple[Format, str]] = {
    "ct-int4-g128": (Format(encode=compressed(4, 128), config=ct("pack-quantized", 4, 128), head=True), "int4-g128"),
    "ct-int4-zeros": (FORMATS["ct-int4-channel-asym"], "int4-channel-zeros"),
    "ct-int8": (FORMATS["ct-int8-channel"], "int8-channel"),
    "ct-fp8": (FORMATS["ct-fp8-channel"], "fp8-channel"),
    "ct-mxfp4": (FORMATS["ct-mxfp4"], "mxfp4-g32"),
    "gptq-g64": (
        Format(encode=gptq(4, 64, symmetric=False), config={**_GPTQ, "group_size": 64, "sym": False}),
        "int4-g64-zeros",
    ),
    "awq-g32": (Format(encode=awq(32), config={**FORMATS["awq"].config, "group_size": 32}), "int4-g32-zeros"),
    "fp8-blocks": (FORMATS["fp8-block-bf16-scales"], "fp8-128x128"),
    "fp8-low-blocks": (
        Format(encode=fp8_block(32, 64), config=FORMATS["fp8-block"].config | {"weight_block_size": [32, 64]}),
        "fp8-32x64",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wide"), "qwen2_moe", seed=3, **WIDE)


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    return quantise(plain, tmp_path_factory.mktemp(request.param), STORED[request.param][0])


def served(folder: Path, dense_format: DenseFormat = "stored") -> ModelSpec:
    return with_weights(load_spec(folder), folder, "dense", dense_format)


def loaded(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> DenseWeights:
    return load_dense(folder, spec, dtype=dtype, device=CPU)


def pairs(spec: ModelSpec, weights: DenseWeights) -> Iterator[tuple[Linear, torch.Tensor | QuantisedWeight]]:
    """Each linear layer, and its weight."""
    found = []
    for layer in weights.layers:
        found += [layer.qkv_OD, layer.o_DO]
        if layer.ffn is not None:
            found += [layer.ffn.gate_up_2FD, layer.ffn.down_DF]
    head = [] if spec.tie_embeddings else [weights.lm_head_VD]
    yield from zip(linears(spec), [*found, *head], strict=True)


def test_every_layer_is_held_as_it_is_stored(stored: Quantised, request: pytest.FixtureRequest) -> None:
    """Queries, keys and values as one matrix; and each value is what the format's definition makes of it."""
    label = STORED[request.node.callspec.params["stored"]][1]
    folder, spec = stored.folder, served(stored.folder)
    assert spec.linears.label == label
    assert {str(kind) for _, kind in spec.linears.kinds} == {label}
    held = 0
    for linear, weight in pairs(spec, loaded(folder, spec)):
        assert isinstance(weight, QuantisedWeight) == (set(linear.names) <= stored.quantised), linear.names
        if isinstance(weight, QuantisedWeight):
            with Checkpoint(folder, spec) as checkpoint:
                expected = torch.cat([checkpoint.read(name) for name in linear.names])
            assert torch.equal(dequantize_experts(weight)[0], expected), linear.names
            held += 1
    assert held == len(spec.linears.kinds) >= 8


def answers(folder: Path, prompts: list[list[int]], count: int, dense_format: DenseFormat) -> list[list[int]]:
    """Those of an engine in float32 with all weights in this process, to all prompts at once."""
    words = ["--model", str(folder), "--dtype", "float32", "--kv-blocks", "64", "--dense-format", dense_format]
    engine = build(load_settings(words), lambda: 0, worker="w").engine
    asked = [ask(str(number), prompt, count, ignore_eos=True) for number, prompt in enumerate(prompts)]
    return [tokens(events) for _, events in sorted(run(engine, *asked).items())]


PROMPTS = [[5 + number, 9, 11 * number + 3] * (1 + 3 * number) for number in range(5)]


def test_answers_are_the_oracles(stored: Quantised) -> None:
    """With shared experts and biases, token for token."""
    expected = oracles_answers(stored.folder, PROMPTS, 8)
    assert answers(stored.folder, PROMPTS, 8, "stored") == expected
    assert len({token for answer in expected for token in answer}) > 10, "answers too uniform to prove much"


@pytest.mark.parametrize(("sorts", "said"), [(False, False), (False, True), (True, True), (True, False)])
def test_files_say_what_order_and_zero_points_there_are(plain: Path, tmp_path: Path, sorts: bool, said: bool) -> None:
    """Layers whose columns are in an order of their own are dense, whatever config.json has of either."""
    config = {**_GPTQ, "group_size": 64, "sym": True, "desc_act": said}
    form = Format(encode=gptq(4, 64, symmetric=False, sorts=sorts), config=config)
    folder = quantise(plain, tmp_path, form).folder
    assert served(folder).linears.label == ("" if sorts else "int4-g64-zeros")
    assert answers(folder, PROMPTS, 8, "stored") == oracles_answers(folder, PROMPTS, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["ct-int8", "gptq-g64"])
def test_so_they_are_of_every_family(tmp_path: Path, family: str, form: str) -> None:
    """With tied embeddings, norms of queries and keys, a clip, and widths that end inside of a group."""
    sizes = {**WIDE, "intermediate_size": 208, "shared_expert_intermediate_size": 176, "num_key_value_heads": 2}
    sizes |= {"tie_word_embeddings": True, "num_experts": 4, "num_local_experts": 4}
    if "kv_lora_rank" in FAMILIES[family]:
        sizes["num_key_value_heads"] = FAMILIES[family]["num_attention_heads"]
    folder = quantise(save_checkpoint(tmp_path / "plain", family, seed=7, **sizes), tmp_path, STORED[form][0]).folder
    assert len(served(folder).linears.kinds) >= 4
    assert answers(folder, PROMPTS, 8, "stored") == oracles_answers(folder, PROMPTS, 8)


def test_memory_is_that_of_the_file(plain: Path, tmp_path: Path) -> None:
    """Within 3 %, and what is foreseen is what is held."""
    for form in ("ct-int4-g128", "ct-int8", "fp8-blocks"):
        folder = quantise(plain, tmp_path / form, STORED[form][0]).folder
        spec = served(folder)
        weights = loaded(folder, spec, torch.float32)
        held = sum(tensor.nbytes for tensor in tensors_in(weights))
        assert dense_bytes(spec, 4) == held
        with Checkpoint(folder, spec) as checkpoint:
            stored_bytes = checkpoint.nbytes(dense_shapes(spec))
        assert held <= 1.03 * stored_bytes, form
        assert dense_bytes(served(folder, "dense"), 4) > 1.5 * held


def test_what_a_cpu_keeps_is_foreseen(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, STORED["ct-int4-g128"][0]).folder
    spec = served(folder)
    weights = loaded(folder, spec, torch.bfloat16)
    made = 0
    for _, weight in pairs(spec, weights):
        if isinstance(weight, QuantisedWeight):
            quantised_linear(torch.ones(1, weight.shape[2], dtype=torch.bfloat16), weight)
            made += sum(form.nbytes for _, form in weight.forms.kept.values())
    assert 0 < made <= linears_kept_on_cpu(spec, "bfloat16") <= 1.15 * made


def test_layers_of_which_parts_differ_are_dense(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that are not quantised, and a gate that is left: what meets the same rows is one matrix. It is logged."""
    left = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj")
    usual = STORED["ct-int4-g128"][0]
    form = dataclasses.replace(usual, left=left, config={**usual.config, "ignore": list(left)})
    folder = quantise(plain, tmp_path, form).folder
    with caplog.at_level("INFO"):
        spec = served(folder)
    assert '; "model.layers.0.self_attn.k_proj.weight" is not stored in a form that kernels take' in caplog.text
    held = dict(spec.linears.kinds)
    assert "model.layers.0.self_attn.q_proj.weight" not in held
    assert "model.layers.1.mlp.gate_proj.weight" not in held
    assert "model.layers.0.self_attn.o_proj.weight" in held
    assert spec.linears.label.startswith("dense.int4-g128-")
    for linear, weight in pairs(spec, loaded(folder, spec)):
        assert isinstance(weight, QuantisedWeight) == (linear.name in held)


def test_the_form_is_in_the_hash_of_the_weights(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, STORED["ct-int8"][0]).folder
    dense, held = served(folder, "dense"), served(folder)
    assert held.weights.startswith(f"{dense.weights}+dense+")
    assert held.fingerprint == dense.fingerprint, "which names the checkpoint alone"
    both = with_weights(load_spec(folder), folder, "auto", "stored").weights
    assert both == f"{dense.weights}+int8-channel+{held.linears.label}"


def test_config_json_alone_says_what_is_held(stored: Quantised) -> None:
    """But for the types of scales, so that a plan counts what a server holds."""
    spec = load_spec(stored.folder)
    planned = held_linears(spec, "stored", promised_kinds(spec))
    found = {name: str(kind) for name, kind in served(stored.folder).linears.kinds if name != LM_HEAD}
    assert {name: str(kind) for name, kind in planned.kinds if name != LM_HEAD} == found


def test_an_unquantised_checkpoint_is_dense(plain: Path) -> None:
    assert not served(plain).linears.kinds
    assert served(plain).weights == served(plain, "dense").weights


def test_what_was_dropped_is_read_again_into_the_same_tensors(plain: Path, tmp_path: Path) -> None:
    folder, source = quantise(plain, tmp_path, STORED["awq-g32"][0]).folder, RememberedWeights(FromCheckpoint())
    spec = source.spec(folder, "dense", "stored")
    weights = load_dense(folder, spec, dtype=torch.float32, device=CPU, source=source)
    tensors, memory = list(tensors_in(weights)), source.memory()
    before = [tensor.clone() for tensor in tensors]
    memory.free(keep=False)
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            tensor.zero_()
    memory.restore()
    source.fill_again()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize(("scale", "found"), [(0.0, "0"), (float("nan"), "NaN"), (float("inf"), "one too large")])
def test_bad_scales_are_refused_by_name(plain: Path, tmp_path: Path, module: str, scale: float, found: str) -> None:
    folder = quantise(plain, tmp_path, STORED["ct-int4-g128"][0]).folder
    name = f"{module}.weight_scale"
    assert name in load_file(folder / WEIGHTS)

    def harm(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0] = scale

    change(folder, harm)
    with pytest.raises(CheckpointError, match=f'"{name}" must hold finite scales other than 0, found {found}'):
        loaded(folder, served(folder))


def test_an_option_that_changes_nothing_is_named(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert served(plain).linears.label == ""
    assert "--dense-format stored changes nothing" in caplog.text


def test_random_weights_are_not_stored(stored: Quantised) -> None:
    with pytest.raises(ConfigError, match="random weights are none"):
        RandomWeights().spec(stored.folder, "auto", "stored")
