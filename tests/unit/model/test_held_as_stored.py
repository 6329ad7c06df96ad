"""Weights that are held as they are stored: values that are not finite, and files that change, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testkit.models.checkpoints import save_checkpoint
from testkit.models.quantised_checkpoints import WEIGHTS, change, quantise
from testkit.models.quantisers import FORMATS, Format, compressed, int_config

from moe_kernels import QuantisedWeight, dequantize_experts
from moe_kernels.quant.cached import expert_product
from services.config import ExpertFormat
from services.errors import CheckpointError
from services.model.checkpoint import Checkpoint
from services.model.dequantised.parts import Parts
from services.model.digests import read_digests, write_digests
from services.model.expert_format import KINDS, Kind
from services.model.experts import ExpertWeights
from services.model.held_experts import held_experts
from services.model.load_spec import load_spec
from services.model.quantised_experts import empty_weight
from services.model.sources import Source, promised_kinds
from services.model.weights import load_experts
from services.model.weights_sample import with_weights

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 2}
DOWN = "model.layers.0.mlp.experts.1.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3_moe", seed=3, **WIDE)


def loaded(folder: Path, form: ExpertFormat, dtype: torch.dtype = torch.float32) -> dict[int, ExpertWeights]:
    return load_experts(folder, with_weights(load_spec(folder), folder, form), dtype=dtype, device=CPU)


def with_first_scale(plain: Path, folder: Path, form: str, scale: float) -> Path:
    """Give the first scale of a matrix another value, in what ``form`` makes of ``plain``."""
    quantised = quantise(plain, folder, FORMATS[form]).folder
    names = [name for name in load_file(quantised / WEIGHTS) if name.startswith(DOWN) or "experts.down_proj" in name]
    name = next(name for name in names if "scale" in name)

    def set_first(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0] = scale

    change(quantised, set_first)
    return quantised


@pytest.mark.parametrize(
    ("form", "scale", "dtype", "expected"),
    [
        ("fp8-block-bf16-scales", 1e37, torch.float32, r"must be finite, found -?inf in row \d+, column \d+"),
        ("fp8-block-bf16-scales", 1e37, torch.bfloat16, r"must be finite, found -?inf in row \d+, column \d+"),
        ("mxfp4", 254, torch.float32, r"must be finite, found -?inf in row \d+, column \d+"),
        ("fp8-block-bf16-scales", 1e4, torch.float16, r"must be finite in float16, found -?\d+e?.* in row \d+"),
        ("ct-int8-channel", 1e4, torch.float16, r"must be finite in float16, found -?\d+e?.* in row \d+"),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name(
    plain: Path, tmp_path: Path, form: str, scale: float, dtype: torch.dtype, expected: str
) -> None:
    """As they are where the weight is dequantised."""
    folder = with_first_scale(plain, tmp_path, form, scale)
    with pytest.raises(CheckpointError, match=f'".*down_proj.*" times its scales {expected}'):
        loaded(folder, "auto", dtype)
    with pytest.raises(CheckpointError, match="down_proj"):
        loaded(folder, "dense", dtype)


def test_a_large_scale_of_small_codes_is_held(plain: Path, tmp_path: Path) -> None:
    """Values count, not the largest that there could be."""
    folder = with_first_scale(plain, tmp_path, "fp8-block-bf16-scales", 1e4)

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.weight"][:128, :128] = torch.tensor(2.0).to(torch.float8_e4m3fn)

    change(folder, shrink)
    weight = loaded(folder, "auto", torch.float16)[0].w_down_EDF
    assert isinstance(weight, QuantisedWeight)
    dense = loaded(folder, "dense", torch.float16)[0].w_down_EDF
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dequantize_experts(weight, torch.float16), dense)


@pytest.mark.parametrize("form", ["auto", "dense"])
def test_a_file_that_is_replaced_while_it_is_read_is_noticed(
    plain: Path, tmp_path: Path, form: ExpertFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantise(plain, tmp_path, FORMATS["ct-int8-channel"]).folder
    parts = Checkpoint._parts

    def replaced(checkpoint: Checkpoint, source: Source) -> Parts:
        found = parts(checkpoint, source)
        copy = tmp_path / "copy"
        copy.write_bytes((folder / WEIGHTS).read_bytes())
        copy.replace(folder / WEIGHTS)
        return found

    monkeypatch.setattr(Checkpoint, "_parts", replaced)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} was changed while it was read"):
        loaded(folder, form)


@pytest.mark.parametrize(
    ("actorder", "sorts", "label"),
    [
        ("group", True, "int4-g128-order"),
        ("dynamic", True, "int4-g128-order"),
        (True, True, "int4-g128-order"),
        ("weight", False, "int4-g128"),
    ],
)
def test_config_json_says_whether_columns_are_sorted(
    plain: Path, tmp_path: Path, actorder: str | bool, sorts: bool, label: str
) -> None:
    """So that a plan, which has no files, counts what a server holds. "weight" sorts nothing that is stored."""
    config = int_config("pack-quantized", 4, 128)
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    form = Format(encode=compressed(4, 128, sorts=sorts), config=config)
    folder = quantise(plain, tmp_path, form).folder
    spec = load_spec(folder)
    assert held_experts(spec, "auto", promised_kinds(spec), folder).label == label
    assert with_weights(spec, folder, "auto").experts.label == label


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [128, 136])
def test_what_a_cpu_keeps_of_a_weight_is_foreseen(rows: int, dtype: str) -> None:
    """From its kind alone: all that is made of its experts, and hardly more."""
    kinds = [*KINDS.values(), *(Kind(bits=bits, group=32, zeros=True) for bits in (4, 8)), Kind(bits=8, group=128)]
    for kind in kinds:
        if kind.problem(rows, 256):
            continue
        q = empty_weight(kind, (2, rows, 256), CPU)
        for part in q.tensors().values():
            part.fill_(1)
        for expert in range(2):
            expert_product(q, expert, torch.ones(1, 256, dtype=getattr(torch, dtype)))
        made = sum(form.nbytes for _, form in q.forms.kept.values())
        assert made <= 2 * kind.kept_on_cpu(rows, 256, dtype) <= 1.15 * made, kind


def test_the_digests_of_what_is_held_as_it_is_stored_are_auto_s(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no other value of the option names that form."""
    folder = quantise(plain, tmp_path, FORMATS["fp8-tensor"]).folder
    caplog.set_level("INFO")
    assert read_digests(folder, with_weights(load_spec(folder), folder, "auto"), "float32") is None
    assert "`expertmesh digests FOLDER` writes the file." in caplog.text


def test_digests_of_held_experts_are_one_phase(plain: Path, tmp_path: Path) -> None:
    folder = quantise(plain, tmp_path, FORMATS["ct-int8-channel"]).folder
    seen = Seen()
    write_digests(folder, progress=seen)
    assert len(seen.began) == 1
    assert seen.began[0] == ("experts' digests", seen.bytes)


class Seen:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.began: list[tuple[str, int]] = []
        self.bytes = 0

    def begin(self, what: str, total_bytes: int) -> None:
        self.began.append((what, total_bytes))

    def advance(self, nbytes: int) -> None:
        self.bytes += nbytes


def test_the_log_names_what_keeps_a_layer_dense(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = DOWN
    config = int_config("pack-quantized", 4, 128) | {"ignore": [left]}
    folder = quantise(plain, tmp_path, Format(encode=compressed(4, 128), config=config, left=(left,))).folder
    caplog.set_level("INFO")
    with_weights(load_spec(folder), folder, "auto")
    assert caplog.messages == [
        f'experts of 1 of 2 layers are held dense: "{DOWN}.weight" is not stored in a form that kernels take, others '
        "of its layer are in int4-g128"
    ]
