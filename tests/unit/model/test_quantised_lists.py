"""Checkpoints of which a part is quantised, or parts in different ways: as lists and groups in config.json say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.quantised_checkpoints import Quantised, change, quantise
from testkit.models.quantisers import FORMATS, Encoded, Format, compressed_fp8
from testkit.models.tiny_models import MIXTRAL, QWEN2, QWEN3, save_model
from torch import Tensor

from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes

Make = Callable[..., Quantised]
ATTENTION = tuple(f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkvo")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(form: Format, family: dict[str, Any] = QWEN3 | {"moe_intermediate_size": 32}, **more: Any) -> Quantised:
        save_model(tmp_path / "plain", family)
        form = dataclasses.replace(form, config={**form.config, **more})
        return quantise(tmp_path / "plain", tmp_path, form)

    return made


def weights(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """All tensors, and the names of those that are stored quantised."""
    spec = load_spec(folder)
    with Checkpoint(folder, spec) as checkpoint:
        names = dense_shapes(spec) | expert_shapes(spec)
        return {name: checkpoint.read(name).clone() for name in names}, set(filter(checkpoint.quantised, names))


def assert_loads(made: Quantised) -> None:
    found, quantised = weights(made.folder)
    exact, _ = weights(made.reference)
    assert quantised == made.quantised
    assert [name for name in exact if not torch.equal(found[name], exact[name])] == []


def linear_modules() -> list[str]:
    parts = [f"experts.{expert}.{part}_proj" for expert in range(8) for part in ("gate", "up", "down")]
    return [*ATTENTION, *(f"model.layers.{layer}.mlp.{part}" for layer in range(3) for part in parts)]


def left(name: str, *modules: str, **more: Any) -> Format:
    return dataclasses.replace(FORMATS[name], left=modules, **more)


QKV = tuple(name for name in ATTENTION if not name.endswith("o_proj"))
EXPERTS = [f"model.layers.0.mlp.experts.{expert}" for expert in range(8)]
GATES_AND_UPS = tuple(f"{expert}.{part}_proj" for expert in EXPERTS for part in ("gate", "up"))
LISTS: dict[str, tuple[Format, dict[str, Any]]] = {
    "ct names": (left("ct-int4-group", *ATTENTION), {"ignore": [*ATTENTION, "lm_head"]}),
    "ct pattern": (left("ct-int4-group", *ATTENTION), {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]}),
    "ct names of vLLM": (
        left("ct-int4-group", *QKV),
        {"ignore": [f"model.layers.{layer}.self_attn.qkv_proj" for layer in range(3)]},
    ),
    "ct pattern of vLLM's names": (left("ct-int4-group", *QKV), {"ignore": ["re:.*self_attn.qkv_proj$"]}),
    "ct pattern of vLLM's names alone": (left("ct-int4-group"), {"ignore": ["re:.*qkv_proj", "lm_head"]}),
    "ct experts in vLLM's names": (
        left("ct-int4-group", *GATES_AND_UPS),
        {"ignore": [f"{expert}.gate_up_proj" for expert in EXPERTS]},
    ),
    "ct all experts of a layer": (
        left("ct-int4-group", *GATES_AND_UPS),
        {"ignore": ["re:.*0.mlp.experts.gate_up_proj"]},
    ),
    "fp8 names of vLLM": (left("fp8-block", *QKV), {"modules_to_not_convert": ["qkv_proj", "lm_head"]}),
    "awq names of vLLM": (left("awq", *QKV), {"modules_to_not_convert": ["self_attn.qkv_proj"]}),
    "fp8 ends": (left("fp8-block", *ATTENTION[::4]), {"modules_to_not_convert": ["q_proj", "lm_head"]}),
    "fp8 beginning": (left("fp8-block", *ATTENTION[:4]), {"modules_to_not_convert": ["model.layers.0.self_attn"]}),
    "fp8 ignored": (left("fp8-block", *ATTENTION), {"ignored_layers": ["model.layers.*.self_attn"]}),
    "fp8 pattern": (left("fp8-block", *ATTENTION), {"ignored_layers": ["re:.*self_attn.*", "lm_head"]}),
    "awq parts": (left("awq", *ATTENTION), {"modules_to_not_convert": ["self_attn", "gate"]}),
    "gptq dynamic": (left("gptq-int4", *ATTENTION), {"dynamic": {r"-:.*self_attn\..*": {}}}),
    "mxfp4 of gpt-oss": (FORMATS["mxfp4"], {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}


@pytest.mark.parametrize(("form", "more"), LISTS.values(), ids=LISTS)
def test_layers_that_are_left(make: Make, form: Format, more: dict[str, Any]) -> None:
    assert_loads(make(form, **more))


def test_layers_inside_a_block_that_gptq_names(make: Make) -> None:
    inside = [["self_attn.k_proj", "self_attn.v_proj"], ["self_attn.q_proj"], ["self_attn.o_proj"]]
    form = FORMATS["gptq-int4"]

    def attention_alone(weight: Tensor) -> Encoded | None:
        return None if weight.shape in {(32, 48), (48, 32)} else form.encode(weight)

    family = QWEN3 | {"moe_intermediate_size": 48}
    made = make(dataclasses.replace(form, encode=attention_alone), family, modules_in_block_to_quantize=inside)
    assert made.quantised == {f"{module}.weight" for module in ATTENTION}
    assert_loads(made)


@pytest.mark.parametrize("name", ["ct-int4-group", "gptq-int4", "fp8-block"])
def test_an_output_head_that_is_quantised(make: Make, name: str) -> None:
    more = {"lm_head": True} if name == "gptq-int4" else {}
    made = make(dataclasses.replace(FORMATS[name], head=True), QWEN2 | {"moe_intermediate_size": 32}, **more)
    assert "lm_head.weight" in made.quantised
    assert_loads(made)


def test_attention_in_fp8_and_experts_in_int4(make: Make) -> None:
    """compressed-tensors' "mixed-precision", for Mixtral, whose layers transformers names otherwise."""
    int4, fp8 = FORMATS["ct-int4-group"], FORMATS["ct-fp8-channel"]
    groups = {
        "attention": {**fp8.config["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]},
        "experts": {**int4.config["config_groups"]["group_0"], "targets": [r"re:model\.layers\.\d+\.mlp\.experts.*"]},
    }
    groups["attention"]["format"], groups["experts"]["format"] = "float-quantized", "pack-quantized"

    def encode(weight: Tensor) -> Encoded | None:
        return int4.encode(weight) if 56 in weight.shape else compressed_fp8("channel")(weight)

    made = make(
        dataclasses.replace(int4, encode=encode),
        MIXTRAL | {"intermediate_size": 56},
        format="mixed-precision",
        config_groups=groups,
    )
    assert_loads(made)


def test_a_pattern_counts_more_than_the_class_of_a_layer(make: Make) -> None:
    """Groups in the order in which compressed-tensors writes them: the one for all other layers is the first."""
    int4, int8 = FORMATS["ct-int4-group"], FORMATS["ct-int8-channel"]
    groups = {
        "group_0": int4.config["config_groups"]["group_0"],
        "group_1": int8.config["config_groups"]["group_0"] | {"targets": [r"re:.*\.(q|o)_proj$"]},
        "group_2": int4.config["config_groups"]["group_0"] | {"targets": ["model.layers.1.self_attn.q_proj"]},
    }

    def encode(weight: Tensor) -> Encoded | None:
        return int8.encode(weight) if weight.shape in {(64, 32), (32, 64)} else int4.encode(weight)

    form = dataclasses.replace(int4, encode=encode, left=("model.layers.1.self_attn.q_proj",))
    made = make(form, config_groups=groups)
    name = "model.layers.1.self_attn.q_proj"
    found = int4.encode(weights(made.reference)[0][f"{name}.weight"])
    assert found is not None

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}.weight"]
        tensors |= {name + end: tensor for end, tensor in found.tensors.items()}

    change(made.folder, edit)
    change(made.reference, lambda tensors: tensors.update({f"{name}.weight": found.value_NK}))
    assert_loads(dataclasses.replace(made, quantised=made.quantised | {f"{name}.weight"}))


def test_targets_in_vllms_names_where_no_group_has_a_layer_by_its_own(make: Make) -> None:
    int4 = FORMATS["ct-int4-group"]
    group = int4.config["config_groups"]["group_0"] | {"targets": ["re:.*qkv_proj", "re:.*gate_up_proj"]}
    rest = tuple(name for name in linear_modules() if name.rpartition(".")[2] in ("o_proj", "down_proj"))
    assert_loads(make(left("ct-int4-group", *rest), config_groups={"group_0": group}))


def test_layers_that_autoround_lists_with_other_bits(make: Make) -> None:
    int4, int8 = FORMATS["gptq-int4"], FORMATS["gptq-int8-row"]

    def encode(weight: Tensor) -> Encoded | None:
        return int8.encode(weight) if weight.shape in {(64, 32), (32, 64)} else int4.encode(weight)

    keys = tuple(f"model.layers.{layer}.self_attn.k_proj" for layer in range(3))
    extra = {
        **{name: {"bits": 16, "data_type": "float"} for name in keys},
        "model.layers.0.mlp.gate": {"bits": 16},
        r".*\.[qo]_proj": {"bits": 8, "group_size": -1, "sym": True},
    }
    form = dataclasses.replace(int4, encode=encode, left=keys)
    assert_loads(make(form, quant_method="auto-round", packing_format="auto_round:auto_gptq", extra_config=extra))


def test_blocks_that_compressed_tensors_writes_as_a_word(make: Make) -> None:
    form = FORMATS["fp8-block-bf16-scales"]

    def encode(weight: Tensor) -> Encoded | None:
        found = form.encode(weight)
        assert found is not None
        tensors = {end.removesuffix("_inv"): tensor for end, tensor in found.tensors.items()}
        return Encoded(tensors=tensors, value_NK=found.value_NK)

    config = dict(FORMATS["ct-fp8-channel"].config)
    group = config["config_groups"]["group_0"]
    block = {"strategy": "block", "block_structure": "128x128"}
    config["config_groups"] = {"group_0": group | {"weights": group["weights"] | block}}
    assert_loads(make(dataclasses.replace(form, encode=encode, config=config)))


def test_layers_that_autoround_leaves_in_awqs_layout(make: Make) -> None:
    extra = {name: {"bits": 16} for name in ATTENTION}
    form = left("awq", *ATTENTION)
    assert_loads(make(form, quant_method="auto-round", packing_format="auto_round:auto_awq", extra_config=extra))


def test_gptq_layers_of_other_bits(make: Make) -> None:
    int4, int8 = FORMATS["gptq-int4"], FORMATS["gptq-int8-row"]

    def encode(weight: Tensor) -> Encoded | None:
        return int8.encode(weight) if weight.shape in {(64, 32), (32, 64)} else int4.encode(weight)

    dynamic = {r"+:.*\.(q|o)_proj$": {"bits": 8, "group_size": -1}}
    assert_loads(make(dataclasses.replace(int4, encode=encode), dynamic=dynamic))


def test_an_order_of_zeros_where_nothing_is_sorted(make: Make) -> None:
    made = make(FORMATS["gptq-int4"])
    change(made.folder, lambda tensors: [t.zero_() for name, t in tensors.items() if name.endswith("g_idx")])
    assert_loads(made)


def test_an_order_with_which_tools_begin(make: Make) -> None:
    made = make(FORMATS["ct-int4-group"])
    name = "model.layers.1.self_attn.q_proj.weight_g_idx"
    change(made.folder, lambda tensors: tensors.update({name: torch.full((32,), -1, dtype=torch.int32)}))
    assert_loads(made)


@pytest.mark.parametrize("name", ["ct-int8-channel", "ct-fp8-channel"])
def test_zero_points_of_zero_and_a_status_that_tools_wrote_once(make: Make, name: str) -> None:
    made = make(FORMATS[name], quantization_status="frozen")
    zero = "model.layers.1.self_attn.q_proj.weight_zero_point"
    kind = torch.int8 if name == "ct-int8-channel" else torch.float8_e4m3fn
    change(made.folder, lambda tensors: tensors.update({zero: torch.zeros(64, 1).to(kind)}))
    assert_loads(made)


def test_scales_of_activations_and_of_the_cache_are_not_read(make: Make) -> None:
    made = make(FORMATS["ct-fp8-channel"])
    beside = ("q_proj.input_scale", "attn.k_scale", "k_scale", "v_scale")
    extra = {f"model.layers.1.self_attn.{name}": torch.ones(1) for name in beside}
    change(made.folder, lambda tensors: tensors.update(extra))
    assert_loads(made)
