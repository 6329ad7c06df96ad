"""Experts whose columns lie in an order of their own (GPTQ's act-order), held as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.checkpoints import save_checkpoint
from testkit.models.quantised_checkpoints import WEIGHTS, change, quantise
from testkit.models.quantisers import FORMATS, Format, compressed, gptq, int_config
from torch import Tensor

from moe_kernels import QuantisedWeight, dequantize_experts, quant
from services.config import ExpertFormat
from services.errors import CheckpointError
from services.model.checkpoint import Checkpoint
from services.model.digests import read_digests, write_digests
from services.model.experts import ExpertShard, ExpertWeights, sliced
from services.model.held_experts import expert_bytes, held_experts
from services.model.load_spec import load_spec
from services.model.names import TensorNames
from services.model.sources import promised_kinds
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.model.weights_sample import with_weights

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 4}
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.{}"


def config(**values: Any) -> Mapping[str, Any]:
    return {**FORMATS["gptq-int4"].config, "group_size": 32, "desc_act": True, **values}


def actorder(group: int) -> Mapping[str, Any]:
    found = int_config("pack-quantized", 4, group)
    found["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return found


STORED: dict[str, tuple[Callable[[int], Format], str]] = {
    "gptq": (lambda seed: Format(encode=gptq(4, 32, sorts=True, seed=seed), config=config()), "int4-g32-order"),
    "gptq-asym-8": (
        lambda seed: Format(
            encode=gptq(8, 64, symmetric=False, sorts=True, seed=seed), config=config(bits=8, group_size=64, sym=False)
        ),
        "int8-g64-zeros-order",
    ),
    "gptq-unsaid": (
        lambda seed: Format(encode=gptq(4, 128, sorts=True, seed=seed), config=config(desc_act=False, group_size=128)),
        "int4-g128-order",
    ),
    "compressed": (
        lambda _: Format(encode=compressed(4, 64, sorts=True), config=actorder(64)),
        "int4-g64-order",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3_moe", seed=3, **WIDE)


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Each expert with an order of its own."""
    form, label = STORED[request.param]
    return mixed(plain, tmp_path_factory.mktemp(request.param), form), label


def mixed(plain: Path, to: Path, form: Callable[[int], Format]) -> Path:
    folders = [quantise(plain, to / str(expert), form(expert)).folder for expert in range(4)]
    tensors = load_file(folders[0] / WEIGHTS)
    for expert, folder in enumerate(folders):
        tensors |= {name: t for name, t in load_file(folder / WEIGHTS).items() if f".experts.{expert}." in name}
    save_file(tensors, folders[0] / WEIGHTS, metadata={"format": "pt"})
    return folders[0]


def served(folder: Path, expert_format: ExpertFormat = "auto") -> ModelSpec:
    return with_weights(load_spec(folder), folder, expert_format)


def loaded(folder: Path, expert_format: ExpertFormat = "auto") -> dict[int, ExpertWeights]:
    return load_experts(folder, served(folder, expert_format), dtype=torch.float32, device=CPU)


def place_of_columns(folder: Path, name: str) -> Tensor:
    """The stored columns in order of their groups."""
    groups = load_file(folder / WEIGHTS)
    module = name.removesuffix(".weight")
    found = next(groups[f"{module}.{end}"] for end in ("g_idx", "weight_g_idx") if f"{module}.{end}" in groups)
    return found.long().sort(stable=True).indices


def test_values_are_those_of_the_file_with_inner_columns_moved(stored: tuple[Path, str]) -> None:
    """Bit for bit, in the order of the down projection's groups; and memory is what was foreseen."""
    folder, label = stored
    spec = served(folder)
    assert spec.experts.label == label
    held = loaded(folder)
    names = TensorNames(spec.family)
    with Checkpoint(folder, spec) as checkpoint:
        for layer, experts in held.items():
            assert isinstance(experts.w_gate_up_E2FD, QuantisedWeight)
            assert isinstance(experts.w_down_EDF, QuantisedWeight)
            assert experts.w_down_EDF.order is None
            w_in, w_down = map(dequantize_experts, (experts.w_gate_up_E2FD, experts.w_down_EDF))
            for expert in range(4):
                ffn = names.expert(layer, expert)
                places = place_of_columns(folder, ffn.down)
                gate, up, down = (checkpoint.read(name) for name in (ffn.gate, ffn.up, ffn.down))
                assert torch.equal(w_down[expert], down[:, places])
                assert torch.equal(w_in[expert], torch.cat([gate[places], up[places]]))
    assert sum(experts.nbytes for experts in held.values()) == expert_bytes(spec, 4)


def outputs(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x_TD, chosen = torch.randn(9, 128, generator=generator), torch.rand(9, 4, generator=generator)
    shard = ExpertShard({0: weights}, num_experts=4)
    return shard.forward(0, x_TD.to(dtype), chosen.topk(2, dim=1).indices, torch.rand(9, 2, generator=generator))


def test_outputs_are_those_of_dense_experts_whole_and_in_slices(stored: tuple[Path, str]) -> None:
    folder, _ = stored
    held, dense = loaded(folder)[0], loaded(folder, "dense")[0]
    torch.testing.assert_close(outputs(held), outputs(dense), atol=1e-5, rtol=1e-5)
    parts = sum(outputs(sliced(held, index, 2)) for index in range(2))
    torch.testing.assert_close(parts, outputs(dense), atol=1e-5, rtol=1e-5)


def test_what_a_cpu_makes_of_them_is_kept(stored: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    held = loaded(stored[0])[0]
    outputs(held)
    monkeypatch.setattr(quant.cached, "_form", lambda *_: pytest.fail("made a second time"))
    outputs(held)


def test_what_is_asked_for_is_held_as_it_is_stored(plain: Path, tmp_path: Path) -> None:
    """Whole numbers of 4 bits in groups of 128, but for the order; other forms are rounded from the values."""
    folder = mixed(plain, tmp_path, STORED["gptq-unsaid"][0])
    assert served(folder, "int4") == served(folder, "auto")
    assert served(folder, "int8").experts.label == "int8-channel"
    assert isinstance(loaded(folder, "int8")[0].w_down_EDF, QuantisedWeight)


def test_digests_are_of_what_is_held(stored: tuple[Path, str]) -> None:
    folder, label = stored
    write_digests(folder)
    found = read_digests(folder, served(folder), "float32")
    assert found is not None
    assert found.experts == label


def test_a_plan_counts_what_config_json_says(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, STORED["gptq"][0](0)).folder
    spec = load_spec(folder)
    assert held_experts(spec, "auto", promised_kinds(spec), folder).label == served(folder).experts.label


def set_groups(tensors: dict[str, Tensor], expert: int, part: str, groups: Tensor) -> None:
    tensors[EXPERT.format(expert, part, "g_idx")] = groups.int()


@pytest.mark.parametrize("zeros", [False, True])
def test_columns_that_are_in_order_after_all_are_held_so(plain: Path, tmp_path: Path, zeros: bool) -> None:
    """As with GPTQ's static groups: no x is gathered."""
    form = Format(encode=gptq(4, 32), config=config(desc_act=not zeros))
    folder = quantise(plain, tmp_path, form).folder
    if zeros:
        change(folder, lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if name.endswith(".g_idx")])
    assert served(folder).experts.label == "int4-g32"
    held = loaded(folder)[0].w_gate_up_E2FD
    assert isinstance(held, QuantisedWeight)
    assert held.order is None


@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_in_order_among_others(plain: Path, tmp_path: Path, expert: int) -> None:
    """As tools leave one that no token met."""
    folder = mixed(plain, tmp_path, STORED["gptq"][0])
    other = quantise(plain, tmp_path / "in order", Format(encode=gptq(4, 32), config=config())).folder
    ordered = {name: t for name, t in load_file(other / WEIGHTS).items() if f".experts.{expert}." in name}
    change(folder, lambda tensors: tensors.update(ordered))
    held, dense = loaded(folder)[0], loaded(folder, "dense")[0]
    assert isinstance(held.w_gate_up_E2FD, QuantisedWeight)
    assert held.w_gate_up_E2FD.order is not None
    assert held.w_gate_up_E2FD.order[expert].tolist() == list(range(128))
    torch.testing.assert_close(outputs(held), outputs(dense), atol=1e-5, rtol=1e-5)


UNFIT: dict[str, tuple[str, Tensor, str]] = {
    "gate and up differ": ("gate", torch.arange(128).flip(0) // 32, "must have their columns in the same order"),
    "groups of other sizes": (
        "down",
        (torch.arange(256) // 40),
        "columns in groups of 32 .*found groups of other sizes",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_orders_in_which_a_layer_cannot_be_held(
    plain: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the expert that is looked at the layer is dense, and the log says so; in another one it is an error that names
    what serves it."""
    part, groups, message = UNFIT[case]
    folder = mixed(plain, tmp_path, STORED["gptq"][0])
    whole = dict(load_file(folder / WEIGHTS))
    change(folder, lambda tensors: set_groups(tensors, 0, part, groups))
    caplog.set_level("INFO")
    spec = served(folder)
    assert [spec.experts.of(layer) is None for layer in spec.moe_layers] == [True, False]
    assert "experts of 1 of 2 layers are held dense" in caplog.text
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    change(folder, lambda tensors: set_groups(tensors, 2, part, groups))
    with pytest.raises(CheckpointError, match=message) as refused:
        loaded(folder)
    assert "Serve it with --expert-format dense" in str(refused.value)
    assert isinstance(loaded(folder, "dense")[0].w_down_EDF, Tensor)


def test_a_file_that_ends_before_what_says_the_order(plain: Path, tmp_path: Path) -> None:
    folder = mixed(plain, tmp_path, STORED["gptq"][0])
    with Checkpoint(folder, load_spec(folder)) as checkpoint:
        file = folder / WEIGHTS
        file.write_bytes(file.read_bytes()[:40_000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors was truncated while it was read"):
            checkpoint.kind(EXPERT.format(0, "down", "weight"))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_config_json_does_not_promise_are_held(
    plain: Path, tmp_path: Path, bits: int, version: str
) -> None:
    """As a tool writes them that forgets to say so. Where there are none, nothing is held for them."""
    said = config(bits=bits, desc_act=False, sym=True, checkpoint_format=version)
    labels = {False: f"int{bits}-g32-zeros", True: f"int{bits}-g32"}
    for symmetric, label in labels.items():
        form = Format(encode=gptq(bits, 32, symmetric=symmetric, v2=version == "gptq_v2"), config=said)
        folder = quantise(plain, tmp_path / str(symmetric), form).folder
        assert served(folder).experts.label == label
        held, dense = loaded(folder)[0], loaded(folder, "dense")[0]
        assert isinstance(held.w_down_EDF, QuantisedWeight)
        assert torch.equal(dequantize_experts(held.w_down_EDF), dense.w_down_EDF)


def test_linear_layers_outside_of_experts_have_no_order(plain: Path, tmp_path: Path) -> None:
    """In a plan as in a server."""
    folder = quantise(plain, tmp_path, STORED["gptq"][0](0)).folder
    spec, name = load_spec(folder), "model.layers.0.self_attn.o_proj.weight"
    with Checkpoint(folder, spec) as checkpoint:
        assert checkpoint.quantised(name)
        assert checkpoint.kind(name) is promised_kinds(spec)(name) is None
