"""Quantised checkpoints that are damaged, or whose config.json and files differ: errors name what, expected, found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.quantised_checkpoints import WEIGHTS, change, configure, quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import QWEN3, save_model
from torch import Tensor

from services.errors import CheckpointError, UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.tensor_entries import tensor_entries
from services.model.weights import load_dense, load_experts

CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_model(folder, QWEN3 | {"num_hidden_layers": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True})
    return folder


@pytest.fixture
def make(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: quantise(plain, tmp_path / "made", FORMATS[name]).folder


def load(folder: Path, dtype: torch.dtype) -> None:
    spec = load_spec(folder)
    load_dense(folder, spec, dtype=dtype, device=CPU)
    load_experts(folder, spec, dtype=dtype, device=CPU)


def refused(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder, dtype)
    assert str(folder) in str(error.value)
    return str(error.value)


def settings(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = config["quantization_config"]
    return found


def put(name: str, at: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name][at] = value

    return edit


SCALES = {
    "fp8-block": (f"{EXPERT}.weight_scale_inv", (0, 2)),
    "ct-int4-group": (f"{EXPERT}.weight_scale", (3, 1)),
    "ct-fp8-channel": (f"{QUERY}.weight_scale", (5, 0)),
    "gptq-int4": (f"{QUERY}.scales", (1, 7)),
    "awq": (f"{EXPERT}.scales", (0, 9)),
}


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "found 0 at"), (torch.nan, "found NaN at"), (torch.inf, "found one too large for")]
)
@pytest.mark.parametrize("form", SCALES)
def test_a_scale_that_is_none(make: Callable[[str], Path], form: str, value: float, words: str) -> None:
    name, at = SCALES[form]
    folder = make(form)
    change(folder, put(name, at, value))
    assert f'tensor "{name}" must hold finite scales other than 0, {words}' in (message := refused(folder))
    assert f"at {list(at)}" in message


def test_a_scale_of_mxfp4_that_is_no_number(make: Callable[[str], Path]) -> None:
    folder = make("mxfp4")
    change(folder, put(f"{EXPERT}_scales", (4, 0), 255))
    assert f'tensor "{EXPERT}_scales" must hold finite scales other than 0, found NaN at [4, 0]' in refused(folder)


@pytest.mark.parametrize(("form", "scale"), [("fp8-block", 1e37), ("ct-int8-channel", 3e38)])
def test_a_scale_whose_products_are_too_large(make: Callable[[str], Path], form: str, scale: float) -> None:
    name = f"{QUERY}.{'weight_scale_inv' if form == 'fp8-block' else 'weight_scale'}"
    folder = make(form)
    change(folder, put(name, (0, 0), scale))
    message = refused(folder)
    assert f'"{QUERY}.weight' in message
    assert "times its scales must be finite, found" in message
    assert "in row 0, column" in message


def test_a_value_that_is_no_number(make: Callable[[str], Path]) -> None:
    folder = make("fp8-block")
    change(folder, put(f"{QUERY}.weight", (3, 7), torch.nan))
    assert f'"{QUERY}.weight" times its scales must be finite, found nan in row 3, column 7' in refused(folder)


def test_values_beyond_the_serving_type(make: Callable[[str], Path]) -> None:
    folder = make("ct-int8-channel")
    change(folder, put(f"{QUERY}.weight_scale", (0, 0), 1e6))
    message = refused(folder, torch.float16)
    assert f'"{QUERY}.weight" has values beyond float16' in message


@pytest.mark.parametrize(("form", "key"), [("ct-int4-group", None), ("awq", "group_size")])
def test_a_group_that_does_not_divide(make: Callable[[str], Path], form: str, key: str | None) -> None:
    folder = make(form)
    own = settings(folder)
    where = own if key else own["config_groups"]["group_0"]["weights"]
    where["group_size"] = 24
    configure(folder, own)
    message = refused(folder)
    assert "groups of 24" in message
    assert "32 columns do not divide into groups of 24" in message
    assert f'"{QUERY}" of shape [64, 32]' in message


@pytest.mark.parametrize(
    ("form", "end"), [("gptq-int4", "qzeros"), ("awq", "qzeros"), ("ct-int4-group-asym", "weight_zero_point")]
)
def test_missing_zero_points(make: Callable[[str], Path], form: str, end: str) -> None:
    folder = make(form)
    change(folder, lambda tensors: tensors.pop(f"{EXPERT}.{end}"))
    message = refused(folder)
    assert f'and lacks "{EXPERT}.{end}": expected' in message
    assert ", found " in message


@pytest.mark.parametrize("form", ["ct-int4-group", "ct-int8-bytes"])
def test_zero_points_where_the_config_has_none(make: Callable[[str], Path], form: str) -> None:
    folder = make(form)
    shape = (64, 4) if form == "ct-int4-group" else (64, 1)
    extra = {f"{QUERY}.weight_zero_point": torch.ones(shape, dtype=torch.int8)}
    change(folder, lambda tensors: tensors.update(extra))
    assert f'"{QUERY}.weight_zero_point" must hold zeros, as config.json has the weights symmetric' in refused(folder)


def test_a_config_that_says_nothing_of_zero_points(make: Callable[[str], Path]) -> None:
    folder = make("ct-int4-group-asym")
    configure(folder, dict(FORMATS["ct-int4-group"].config))
    message = refused(folder)
    assert "calls for" in message
    assert "weight_zero_point" in message


LISTS = {
    "a layer that is not there": (["model.layers.9.mlp.gate", "lm_head"], "model.layers.9.mlp.gate"),
    "nothing": (["visual"], "visual"),
    "a pattern of nothing": (["re:.*audio.*"], "re:.*audio.*"),
}


@pytest.mark.parametrize(("left", "shown"), LISTS.values(), ids=LISTS)
def test_a_list_of_layers_that_names_none(make: Callable[[str], Path], left: list[str], shown: str) -> None:
    folder = make("ct-int4-group")
    configure(folder, settings(folder) | {"ignore": left})
    message = refused(folder)
    assert f'leaves "{shown}" unquantised, expected the name of a layer, found none of that name' in message


@pytest.mark.parametrize(("form", "key"), [("ct-int4-group", "ignore"), ("awq", "modules_to_not_convert")])
@pytest.mark.parametrize("empty", ["", "re:", "."])
def test_an_empty_name_in_a_list_does_not_name_all(
    make: Callable[[str], Path], form: str, key: str, empty: str
) -> None:
    folder = make(form)
    configure(folder, settings(folder) | {key: ["lm_head", empty]})
    assert f'leaves "{empty}" unquantised, expected the name of a layer' in refused(folder)


def test_lists_of_other_models_layers_beside_ones_own(make: Callable[[str], Path]) -> None:
    folder = make("ct-int4-group")
    configure(
        folder, settings(folder) | {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "visual"]}
    )
    tensor_entries(folder, load_spec(folder))


def test_two_formats_in_one_checkpoint(make: Callable[[str], Path]) -> None:
    folder = make("gptq-int4")
    other = FORMATS["ct-int4-group"].encode(torch.randn(32, 32))
    assert other is not None

    def edit(tensors: Tensors) -> None:
        for end in (".qweight", ".qzeros", ".scales", ".g_idx"):
            del tensors[EXPERT + end]
        tensors |= {EXPERT + end: tensor for end, tensor in other.tensors.items()}

    change(folder, edit)
    message = refused(folder)
    assert f'"{EXPERT}" is GPTQ int4, groups of 16 by quantization_config' in message
    assert f'found "{EXPERT}.weight_packed" (I32 [32, 4])' in message


def test_both_forms_of_one_layer(make: Callable[[str], Path]) -> None:
    folder = make("gptq-int4")
    change(folder, lambda tensors: tensors.update({f"{EXPERT}.weight": torch.zeros(32, 32)}))
    message = refused(folder)
    assert f'found "{EXPERT}.g_idx"' in message
    assert f'"{EXPERT}.weight" (F32 [32, 32])' in message


def test_a_config_that_promises_what_files_do_not_hold(make: Callable[[str], Path], plain: Path) -> None:
    folder = make("fp8-block")
    (folder / WEIGHTS).write_bytes((plain / WEIGHTS).read_bytes())
    message = refused(folder)
    assert f'"{QUERY}" is FP8 in blocks of 16 x 8 by quantization_config of config.json' in message
    assert f'expected "{QUERY}.weight" (F8_E4M3 [64, 32])' in message
    assert f'found "{QUERY}.weight" (F32 [64, 32])' in message


def test_a_config_that_leaves_what_files_quantise(make: Callable[[str], Path]) -> None:
    folder = make("ct-int4-group")
    configure(folder, settings(folder) | {"ignore": ["lm_head", QUERY]})
    message = refused(folder)
    assert f'leaves "{QUERY}" unquantised: expected "{QUERY}.weight" (BF16 or F16 or F32 or F64)' in message
    assert f'"{QUERY}.weight_packed" (I32 [64, 4])' in message


@pytest.mark.parametrize("form", ["gptq-int4", "ct-int4-group", "mxfp4", "fp8-block"])
def test_quantised_files_of_which_the_config_says_nothing(make: Callable[[str], Path], form: str) -> None:
    folder = make(form)
    configure(folder, None)
    assert "is of a quantised checkpoint, expected a quantization_config in config.json" in refused(folder)


@pytest.mark.parametrize(
    ("form", "other"), [("gptq-int4", "awq"), ("awq", "gptq-int4"), ("ct-int4-group", "ct-int8-channel")]
)
def test_a_config_of_another_format(make: Callable[[str], Path], form: str, other: str) -> None:
    folder = make(form)
    configure(folder, dict(FORMATS[other].config))
    message = refused(folder)
    assert "calls for" in message
    assert ", found " in message


def test_shapes_and_types_are_named(make: Callable[[str], Path]) -> None:
    folder = make("fp8-block")
    change(folder, lambda tensors: tensors.update({f"{EXPERT}.weight_scale_inv": torch.ones(3, 4)}))
    expected = f'calls for "{EXPERT}.weight_scale_inv" (F32 or BF16 or F16 or F8_E8M0 or U8 [2, 4]), found F32 [3, 4]'
    assert expected in refused(folder)


def test_an_order_of_groups_that_are_not_there(make: Callable[[str], Path]) -> None:
    folder = make("gptq-int4-act-order")
    change(folder, put(f"{QUERY}.g_idx", (5,), 9))
    assert f'tensor "{QUERY}.g_idx" must hold groups from 0 to 1, found 0 to 9' in refused(folder)


def test_a_shape_that_is_another(make: Callable[[str], Path]) -> None:
    folder = make("ct-int4-group")
    change(folder, put(f"{QUERY}.weight_shape", (0,), 63))
    assert f'tensor "{QUERY}.weight_shape" must hold [64, 32]' in (message := refused(folder))
    assert "found [63, 32]" in message


def test_a_bias_that_has_no_place(make: Callable[[str], Path]) -> None:
    folder = make("gptq-int4")
    change(folder, lambda tensors: tensors.update({f"{QUERY}.bias": torch.zeros(64, dtype=torch.float16)}))
    load_dense(folder, load_spec(folder), dtype=torch.float32, device=CPU)
    change(folder, put(f"{QUERY}.bias", (3,), 1.0))
    assert f'tensor "{QUERY}.bias" must hold zeros' in refused(folder)


def test_a_tensor_for_which_there_is_no_place(make: Callable[[str], Path]) -> None:
    folder = make("awq")
    change(folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.qweight": torch.zeros(2).int()}))
    assert '"model.layers.7.mlp.up_proj.qweight"' in refused(folder)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_shard(make: Callable[[str], Path], keep: float) -> None:
    folder = make("gptq-int4")
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(keep * len(content))])
    message = refused(folder)
    assert f"{WEIGHTS} is truncated or damaged" in message
    assert re.search(r'; the first tensor that is not whole is "model[.\w]+", of which [\d,]+ bytes are there', message)


CT = FORMATS["ct-int4-group"].config["config_groups"]["group_0"]
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({"bits": 4}, "without a quant_method"),
    "method": ({"quant_method": "hqq"}, 'of quant_method "hqq" are not supported'),
    "fp8 kind": ({"quant_method": "fp8", "fmt": "e5m2"}, '"fmt" "e5m2"'),
    "fp8 block": ({"quant_method": "fp8", "weight_block_size": [128]}, "the rows and columns of a block, found [128]"),
    "fp8 block of 0": ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "found [128, 0]"),
    "gptq bits": ({"quant_method": "gptq", "bits": 3, "group_size": 16}, "codes of 3 bits"),
    "gptq without bits": ({"quant_method": "gptq"}, '"bits" must be a whole number above 0, found nothing'),
    "gptq group": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, '"group_size" must be a whole number'),
    "gptq form": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'the format "marlin"'),
    "gptq targets": (
        {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[3]]},
        '"modules_in_block_to_quantize" must be a list of lists of names',
    ),
    "awq bits": ({"quant_method": "awq", "bits": 8}, "codes of 8 bits"),
    "awq version": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'the version "gemv"'),
    "ct without groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        '"config_groups" must be',
    ),
    "ct form": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": CT}},
        'the format "nvfp4-pack-quantized"',
    ),
    "ct bits": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": CT | {"weights": CT["weights"] | {"num_bits": 3}}},
        },
        '"pack-quantized" weights of 3 bits of type "int"',
    ),
    "ct strategy": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": CT | {"weights": CT["weights"] | {"strategy": "token"}}},
        },
        '"strategy" "token"',
    ),
    "ct block": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": CT | {"weights": CT["weights"] | {"strategy": "block", "block_structure": "128x"}}},
        },
        "the rows and columns of a block, found '128x'",
    ),
    "autoround kind": ({"quant_method": "auto-round", "bits": 8, "data_type": "mx_fp"}, '"data_type" "mx_fp"'),
    "autoround awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "extra_config": {"a": {}}},
        "AWQ with layers of other bits",
    ),
    "ct pattern": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": CT},
            "ignore": ["re:.*(gate"],
        },
        '"re:.*(gate" in quantization_config is not a pattern',
    ),
    "ct sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "with a sparsity_config are not supported",
    ),
    "not an object": ([], '"quantization_config" must be an object'),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("found", "words"), SETTINGS.values(), ids=SETTINGS)
def test_settings_without_a_meaning(plain: Path, tmp_path: Path, found: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    configure(tmp_path, found)
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        load_spec(tmp_path)
    assert words in str(error.value)
    assert "config.json" in str(error.value)


def test_a_file_that_is_cut_short_while_it_is_read(make: Callable[[str], Path]) -> None:
    """A map of it would end the process."""
    folder = make("gptq-int4")
    spec = load_spec(folder)
    with Checkpoint(folder, spec) as checkpoint:
        checkpoint.read(f"{QUERY}.weight")
        os.truncate(folder / WEIGHTS, 1000)
        with pytest.raises(CheckpointError, match=f"{WEIGHTS} was truncated while it was read"):
            checkpoint.read(f"{EXPERT}.weight")


def test_a_file_that_changes_while_it_is_read(make: Callable[[str], Path]) -> None:
    folder = make("gptq-int4")
    spec = load_spec(folder)

    class Written:
        """It says once that bytes were read, and is written to then."""

        def begin(self, _what: str, _total: int) -> None: ...

        def advance(self, _count: int) -> None:
            os.utime(folder / WEIGHTS)

    with pytest.raises(CheckpointError, match=f"{WEIGHTS} was changed while it was read"):
        load_experts(folder, spec, dtype=torch.float32, device=CPU, progress=Written())
