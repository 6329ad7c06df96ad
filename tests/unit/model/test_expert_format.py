"""Experts held as integers: rounded while they are loaded, or as the checkpoint has them; sliced, refused, bounded."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.checkpoints import save_checkpoint
from testkit.models.quantised_checkpoints import WEIGHTS, Quantised, change, quantise
from testkit.models.quantisers import FORMATS, Format, awq, compressed, gptq
from testkit.models.quantisers import int_config as ct

from moe_kernels import QuantisedWeight, dequantize_experts
from services.attention.lockstep_engine import LockstepRank
from services.config import ExpertFormat, Settings
from services.errors import CheckpointError, ConfigError
from services.model.checkpoint import Checkpoint
from services.model.digests import digests_file, read_digests, write_digests
from services.model.expert_format import ALL_DENSE, KINDS, Kind, held
from services.model.experts import ExpertShard, ExpertWeights, sliced
from services.model.held_experts import check_slices, expert_bytes
from services.model.host_memory import spare
from services.model.load_spec import load_spec
from services.model.names import TensorNames
from services.model.quantised_experts import empty_weight
from services.model.reference import ROUNDED, ReferenceModel
from services.model.spec import ModelSpec
from services.model.weight_source import RandomWeights
from services.model.weights import load_experts
from services.model.weights_sample import with_weights

CPU = torch.device("cpu")
FORMS: list[ExpertFormat] = ["int8", "int4", "int4-channel", "fp8", "mxfp4"]
WIDE = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 4}
STORED: dict[str, tuple[Format, str]] = {
    "ct-int4-g128": (Format(encode=compressed(4, 128), config=ct("pack-quantized", 4, 128)), "int4-g128"),
    "ct-int8-channel": (FORMATS["ct-int8-channel"], "int8-channel"),
    "ct-int8-bytes": (FORMATS["ct-int8-bytes"], "int8-channel"),
    "gptq-int4-g128": (
        Format(encode=gptq(4, 128), config={**FORMATS["gptq-int4"].config, "group_size": 128}),
        "int4-g128",
    ),
    "gptq-int8-row": (FORMATS["gptq-int8-row"], "int8-channel"),
    "gptq-int4-g64-asym": (
        Format(
            encode=gptq(4, 64, symmetric=False),
            config={**FORMATS["gptq-int4"].config, "group_size": 64, "sym": False},
        ),
        "int4-g64-zeros",
    ),
    "awq-g32": (Format(encode=awq(32), config={**FORMATS["awq"].config, "group_size": 32}), "int4-g32-zeros"),
    "ct-int4-asym": (FORMATS["ct-int4-channel-asym"], "int4-channel-zeros"),
    "ct-int8-bytes-asym": (
        Format(
            encode=compressed(8, 32, symmetric=False, as_bytes=True),
            config=ct("naive-quantized", 8, 32, symmetric=False),
        ),
        "int8-g32-zeros",
    ),
    "fp8-blocks": (FORMATS["fp8-block-bf16-scales"], "fp8-128x128"),
    "fp8-tensor": (FORMATS["fp8-tensor"], "fp8-channel"),
    "ct-fp8-channel": (FORMATS["ct-fp8-channel"], "fp8-channel"),
    "mxfp4": (FORMATS["mxfp4"], "mxfp4-g32"),
    "ct-mxfp4": (FORMATS["ct-mxfp4"], "mxfp4-g32"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3_moe", seed=3, **WIDE)


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    return quantise(plain, tmp_path_factory.mktemp(request.param), STORED[request.param][0])


def served(folder: Path, expert_format: ExpertFormat) -> ModelSpec:
    return with_weights(load_spec(folder), folder, expert_format)


def loaded(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[int, ExpertWeights]:
    return load_experts(folder, spec, dtype=dtype, device=CPU)


def values(weight: object) -> torch.Tensor:
    assert isinstance(weight, QuantisedWeight)
    return dequantize_experts(weight)


def expected(
    folder: Path, spec: ModelSpec, layer: int, form: ExpertFormat = "dense"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each expert's matrices stand for, from the checkpoint; rounded if ``form`` rounds."""
    with Checkpoint(folder, spec) as checkpoint:

        def value(name: str) -> torch.Tensor:
            weight = checkpoint.read(name).float()
            return ROUNDED[form](weight) if form in ROUNDED else weight

        ffns = [TensorNames(spec.family).expert(layer, expert) for expert in range(spec.num_experts)]
        w_in = torch.stack([torch.cat([value(ffn.gate), value(ffn.up)]) for ffn in ffns])
        return w_in, torch.stack([value(ffn.down) for ffn in ffns])


@pytest.mark.parametrize("expert_format", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_while_they_are_loaded(plain: Path, expert_format: ExpertFormat, dtype: torch.dtype) -> None:
    """Codes are of the stored values, whatever the serving dtype."""
    spec, kind = served(plain, expert_format), KINDS[expert_format]
    held = loaded(plain, spec, dtype)
    for layer, experts in held.items():
        w_in, w_down = expected(plain, spec, layer, expert_format)
        assert torch.equal(values(experts.w_gate_up_E2FD), w_in)
        assert torch.equal(values(experts.w_down_EDF), w_down)
    assert sum(experts.nbytes for experts in held.values()) == expert_bytes(spec, 4)
    assert spec.weights.endswith(f"+{kind}")


@pytest.mark.parametrize("expert_format", [form for form in FORMS if form != "fp8"])
def test_the_last_group_may_have_fewer_columns(tmp_path: Path, expert_format: ExpertFormat) -> None:
    """Whose scale is its own: it shares none with the next row. FP8 has rows in multiples of 128."""
    folder = save_checkpoint(tmp_path, "qwen3_moe", **WIDE | {"hidden_size": 144, "moe_intermediate_size": 208})
    spec = served(folder, expert_format)
    experts = loaded(folder, spec)[0]
    w_in, w_down = expected(folder, spec, 0, expert_format)
    assert torch.equal(values(experts.w_gate_up_E2FD), w_in)
    assert torch.equal(values(experts.w_down_EDF), w_down)


def test_a_share_in_another_order_has_the_same_codes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where experts are read one at a time."""
    spec = served(plain, "int4")
    whole = loaded(plain, spec)[1].w_down_EDF
    monkeypatch.setattr("services.model.quantised_experts.STAGED_BYTES", 1)
    share = load_experts(plain, spec, dtype=torch.float32, device=CPU, experts={1: (3, 0, 2)})[1]
    assert share.expert_ids == (3, 0, 2)
    assert torch.equal(values(share.w_down_EDF), values(whole)[[3, 0, 2]])


def test_what_is_stored_as_kernels_take_it_is_held_as_it_is(stored: Quantised, request: pytest.FixtureRequest) -> None:
    spec = served(stored.folder, "auto")
    label = STORED[request.node.callspec.params["stored"]][1]
    assert spec.experts.label == label
    for layer, experts in loaded(stored.folder, spec).items():
        w_in, w_down = expected(stored.folder, spec, layer)
        assert torch.equal(values(experts.w_gate_up_E2FD), w_in)
        assert torch.equal(values(experts.w_down_EDF), w_down)


def test_memory_is_that_of_the_file(plain: Path, tmp_path: Path) -> None:
    half = Format(encode=compressed(4, 128), config=ct("pack-quantized", 4, 128))
    folder = quantise(plain, tmp_path, half).folder
    spec = served(folder, "auto")
    held = sum(experts.nbytes for experts in loaded(folder, spec).values())
    tensors = load_file(folder / WEIGHTS)
    file = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    assert abs(held / file - 1) < 0.03


def test_dense_is_what_the_integers_stand_for(stored: Quantised) -> None:
    spec = served(stored.folder, "dense")
    assert spec.experts.label == ""
    assert "+" not in spec.weights
    experts = loaded(stored.folder, spec)[0]
    assert isinstance(experts.w_down_EDF, torch.Tensor)
    assert torch.equal(experts.w_down_EDF, expected(stored.folder, spec, 0)[1])


def test_integers_of_another_form_are_dequantised_and_rounded(plain: Path, tmp_path: Path) -> None:
    """Groups of 16 are none that kernels take: "auto" holds them dense, "int4" rounds what they stand for."""
    folder = quantise(plain, tmp_path, FORMATS["awq"]).folder
    assert served(folder, "auto").experts.label == ""
    spec = served(folder, "int4")
    w_down = expected(folder, spec, 1, "int4")[1]
    assert torch.equal(values(loaded(folder, spec)[1].w_down_EDF), w_down)


def test_asked_for_what_the_checkpoint_has_nothing_is_rounded_again(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, STORED["ct-int4-g128"][0]).folder
    assert served(folder, "int4") == served(folder, "auto")
    tokens = [5, 9, 200, 31]
    stored, asked = (ReferenceModel.load(folder, expert_format=form).logits(tokens) for form in ("dense", "int4"))
    assert torch.equal(stored, asked), "the oracle, too"


def test_a_layer_whose_experts_are_not_all_stored_alike_is_dense(plain: Path, tmp_path: Path) -> None:
    """For whoever holds none of those that differ, too. "int4" rounds the one that is left, and takes the others."""
    left = "model.layers.0.mlp.experts.3.down_proj"
    form = STORED["ct-int4-g128"][0]
    form = dataclasses.replace(form, left=(left,), config={**form.config, "ignore": [left]})
    folder = quantise(plain, tmp_path, form).folder
    spec = served(folder, "auto")
    assert [spec.experts.of(layer) is None for layer in spec.moe_layers] == [True, False]
    assert spec.experts.label.startswith("dense.int4-g128-")
    share = load_experts(folder, spec, dtype=torch.float32, device=CPU, experts={0: (0, 1), 1: (0, 1)})
    assert isinstance(share[0].w_down_EDF, torch.Tensor)
    assert isinstance(share[1].w_down_EDF, QuantisedWeight)
    rounded = served(folder, "int4")
    w_down = values(loaded(folder, rounded)[0].w_down_EDF)
    assert torch.equal(w_down[3], expected(folder, rounded, 0, "int4")[1][3])
    write_digests(folder)
    assert read_digests(folder, spec, spec.dtype) is not None
    assert read_digests(folder, spec, "bfloat16") is None, "layer 0 is in the checkpoint's own dtype"


def test_random_weights_are_rounded_too(plain: Path) -> None:
    spec = RandomWeights().spec(plain, "int8")
    experts = load_experts(plain, spec, dtype=torch.float32, device=CPU, source=RandomWeights())
    assert isinstance(experts[0].w_down_EDF, QuantisedWeight)


@pytest.mark.parametrize("expert_format", FORMS)
def test_slices_add_up_to_the_whole(plain: Path, expert_format: ExpertFormat) -> None:
    spec = served(plain, expert_format)
    whole = loaded(plain, spec)[0]
    parts = [sliced(whole, index, 2) for index in range(2)]
    x_TD, ids_TK = torch.randn(9, 128), torch.rand(9, 4).topk(2, dim=1).indices
    weights_TK = torch.rand(9, 2)

    def output(weights: ExpertWeights) -> torch.Tensor:
        return ExpertShard({0: weights}, num_experts=4).forward(0, x_TD, ids_TK, weights_TK)

    torch.testing.assert_close(sum(map(output, parts)), output(whole), atol=1e-5, rtol=1e-5)


def test_a_cut_inside_of_a_group_is_refused(plain: Path) -> None:
    whole = loaded(plain, served(plain, "int4"))[0]
    with pytest.raises(ConfigError, match="Experts of width 256 that are held quantised cannot be split into 4 slices"):
        sliced(whole, 1, 4)


@pytest.mark.parametrize("expert_format", [*FORMS, "dense"])
@pytest.mark.parametrize("width", [256, 384, 768])
def test_slices_are_refused_before_anything_is_loaded(tmp_path: Path, expert_format: ExpertFormat, width: int) -> None:
    """Those that could not be cut, and no others."""
    folder = save_checkpoint(tmp_path, "qwen3_moe", **WIDE | {"moe_intermediate_size": width, "num_experts": 2})
    spec = served(folder, expert_format)
    whole = loaded(folder, spec)[0]
    for count in (1, 2, 3, 4, 5, 6, 8, 16, 24):
        refusals = [_refusal(sliced, whole, 0, count), _refusal(check_slices, spec, count)]
        assert refusals in ([False, False], [True, True]), count


def test_slices_of_rows_that_share_a_scale(plain: Path) -> None:
    """Where that is more of them than columns of a group."""
    kind = Kind(bits=8, group=32, codes="e4m3", scale_rows=64, scale_type="float32")
    whole = ExpertWeights(
        expert_ids=(0,),
        w_gate_up_E2FD=empty_weight(kind, (1, 512, 128), CPU),
        w_down_EDF=empty_weight(kind, (1, 128, 256), CPU),
    )
    spec = dataclasses.replace(served(plain, "dense"), experts=held({0: kind}))
    for count, refused in ((4, False), (8, True)):
        assert _refusal(sliced, whole, 0, count) == _refusal(check_slices, spec, count) == refused


def _refusal(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except ConfigError:
        return True
    return False


def test_a_rank_is_refused_its_slices_before_it_loads(plain: Path) -> None:
    settings = Settings(model=plain, layout="lockstep", workers=4, expert_slices=4)
    with pytest.raises(
        ConfigError, match="held in int4-g128 cannot be split into 4 slices: expected a multiple of 128"
    ):
        LockstepRank(settings, served(plain, "int4"), dtype=torch.float32, device=CPU, step_tokens=8)


@pytest.mark.parametrize("form", ["fp8-blocks", "gptq-int4-g64-asym", "ct-fp8-channel", "mxfp4"])
def test_random_weights_take_the_form_that_config_json_says(plain: Path, tmp_path: Path, form: str) -> None:
    """A folder without weights: each expert is rounded to it."""
    folder = quantise(plain, tmp_path, STORED[form][0]).folder
    (folder / WEIGHTS).unlink()
    spec = RandomWeights().spec(folder, "auto")
    assert spec.experts.label == STORED[form][1]
    held = load_experts(folder, spec, dtype=torch.float32, device=CPU, source=RandomWeights())[0]
    assert isinstance(held.w_down_EDF, QuantisedWeight)
    dense = load_experts(
        folder, dataclasses.replace(spec, experts=ALL_DENSE), dtype=torch.float32, device=CPU, source=RandomWeights()
    )[0].w_down_EDF
    assert isinstance(dense, torch.Tensor)
    off = float((values(held.w_down_EDF) - dense).norm() / dense.norm())
    assert 0.001 < off < 0.2


def test_random_weights_in_an_order_of_columns(plain: Path, tmp_path: Path) -> None:
    """Whose copies of rows a bench would measure."""
    config = {**FORMATS["gptq-int4"].config, "group_size": 32, "desc_act": True}
    folder = quantise(plain, tmp_path, Format(encode=gptq(4, 32, sorts=True), config=config)).folder
    spec = RandomWeights().spec(folder, "auto")
    held = load_experts(folder, spec, dtype=torch.float32, device=CPU, source=RandomWeights())[0].w_gate_up_E2FD
    assert isinstance(held, QuantisedWeight)
    assert held.order is not None
    assert held.order.tolist() == [list(range(128))] * 4


def test_a_shard_leaves_the_host_some_memory(plain: Path) -> None:
    held = sliced(loaded(plain, served(plain, "int8"))[0], 1, 2)
    ExpertShard({0: held}, num_experts=4)
    assert isinstance(held.w_down_EDF, QuantisedWeight)
    assert held.w_down_EDF.forms.spare is spare


def test_widths_that_the_format_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=40)
    with pytest.raises(ConfigError) as refused:
        served(folder, "int4")
    assert '"model.layers.0.mlp.experts.0.down_proj.weight" cannot be held in int4' in str(refused.value)
    assert "expected columns in a multiple of 16, found 64 x 40" in str(refused.value)
    assert "Choose --expert-format auto." in str(refused.value)
    assert served(folder, "auto").experts.label == ""


def test_a_value_that_cannot_be_held_is_named(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def corrupt(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][4, 5] = torch.inf

    change(folder, corrupt)
    with pytest.raises(CheckpointError, match=f'"{name}" cannot be held in int4-g128: expected finite values'):
        loaded(folder, served(folder, "int4"))


def test_zero_points_that_config_json_does_not_promise_are_found(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, STORED["gptq-int4-g128"][0]).folder
    name = "model.layers.0.mlp.experts.1.down_proj.qzeros"

    def corrupt(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] += 1

    change(folder, corrupt)
    with pytest.raises(CheckpointError) as refused:
        loaded(folder, served(folder, "auto"))
    assert f'"{name}" must hold the zero point 8 alone for its weight to be held as it is stored' in str(refused.value)
    assert "Serve it with --expert-format dense, int8, " in str(refused.value)
    loaded(folder, served(folder, "dense"))


def digests_told(caplog: pytest.LogCaptureFixture, folder: Path, spec: ModelSpec) -> str:
    """The command that the log has for digests that are not there."""
    caplog.clear()
    caplog.set_level("INFO")
    assert read_digests(folder, spec, "float32") is None
    return caplog.messages[0].split("`")[1]


def test_digests_are_of_what_is_held(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = quantise(plain, tmp_path, STORED["ct-int4-g128"][0]).folder
    specs = {name: served(folder, name) for name in ("auto", "int8", "dense")}
    write_digests(folder)
    assert digests_file(folder, specs["auto"]).name == ".expertmesh-digests-int4-g128"
    assert read_digests(folder, specs["auto"], "bfloat16") is not None
    assert read_digests(folder, specs["int8"], "float32") is None
    write_digests(folder, "int8")
    found = read_digests(folder, specs["int8"], "float32")
    assert found is not None
    assert found.experts == "int8-channel"
    renamed = dataclasses.replace(specs["int8"], experts=specs["auto"].experts)
    assert digests_told(caplog, folder, specs["dense"]) == "expertmesh digests FOLDER --expert-format dense"
    assert digests_told(caplog, folder, served(folder, "fp8")) == "expertmesh digests FOLDER --expert-format fp8"
    digests_file(folder, specs["auto"]).unlink()
    assert digests_told(caplog, folder, specs["auto"]).endswith("digests FOLDER --expert-format int4")
    digests_file(folder, specs["int8"]).rename(digests_file(folder, renamed))
    assert read_digests(folder, renamed, "float32") is None


def test_the_oracle_rounds_as_the_loader_does(plain: Path) -> None:
    """And so differs from itself over the weights as they are."""
    tokens = [5, 9, 200, 31]
    exact, rough = (ReferenceModel.load(plain, expert_format=form).logits(tokens) for form in ("dense", "int4"))
    assert not torch.allclose(exact, rough, atol=1e-3)


_LOAD = """
import sys, torch
from pathlib import Path
from services.model.load_spec import load_spec
from services.model.weights import load_experts
from services.model.weights_sample import with_weights

def own(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) << 10

folder = Path(sys.argv[1])
torch.set_num_threads(1)
spec = with_weights(load_spec(folder), folder, sys.argv[2])
torch.randn(64, 64) @ torch.randn(64, 64)
before = own("RssAnon")
held = load_experts(folder, spec, dtype=torch.bfloat16, device=torch.device("cpu"))
print(own("VmHWM") - own("VmRSS") + own("RssAnon") - before, sum(layer.nbytes for layer in held.values()))
"""


@pytest.mark.parametrize("expert_format", ["int8", "int4"])
def test_memory_while_rounding_is_the_result_and_a_few_experts(tmp_path: Path, expert_format: str) -> None:
    """And what is staged. A second copy of the weights in bfloat16 would be 192 MiB."""
    hidden, width, experts = 1024, 512, 32
    folder = save_checkpoint(
        tmp_path, "qwen3_moe", num_experts=2, hidden_size=hidden, head_dim=32, moe_intermediate_size=width
    )
    _more_experts(folder, experts, layers=2)
    ran = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder), expert_format], capture_output=True, text=True, check=True
    )
    most, held = map(int, ran.stdout.split())
    one = 3 * hidden * width * 4
    assert held < most < held + (64 << 20) + 8 * one


def _more_experts(folder: Path, count: int, layers: int) -> None:
    """Give each layer ``count`` experts, all like the first, in bfloat16."""
    config = folder / "config.json"
    values = json.loads(config.read_text())
    values |= {name: count for name in ("num_experts", "num_local_experts") if name in values}
    config.write_text(json.dumps(values))
    tensors = load_file(folder / WEIGHTS)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.randn(count, tensors[f"{prefix}.gate.weight"].shape[1])
        for part in ("gate", "up", "down"):
            first = tensors[f"{prefix}.experts.0.{part}_proj.weight"].bfloat16()
            tensors |= {f"{prefix}.experts.{expert}.{part}_proj.weight": first.clone() for expert in range(count)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
