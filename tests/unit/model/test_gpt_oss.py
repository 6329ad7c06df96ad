"""gpt-oss alone: experts in one tensor of all, as numbers and in MXFP4, and what is said where files are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from testkit.models.gpt_oss import in_mxfp4
from testkit.models.quantised_checkpoints import WEIGHTS, change, configure
from testkit.models.tiny_models import GPT_OSS, ServingPath, save_model
from torch import Tensor

from moe_kernels import QuantisedWeight
from services.errors import CheckpointError, ConfigError, UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.experts import ExpertShard, ExpertWeights, sliced
from services.model.held_experts import expert_bytes
from services.model.load_spec import load_spec
from services.model.reference import ReferenceModel
from services.model.weights import load_experts
from services.model.weights_sample import with_weights

CPU = torch.device("cpu")
TOKENS = [3, 90, 17, 44, 5, 61, 8, 8, 29, 70, 11, 2, 55]
WIDE: dict[str, Any] = GPT_OSS | {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 4, "head_dim": 16}
"""Columns that are a multiple of 32, and of nothing larger, as 2,880 is."""
PREFIX = "model.layers.{}.mlp.experts."


def served(folder: Path, **how: Any) -> Tensor:
    path = ServingPath(folder, **how)
    run = path.start(TOKENS)
    path.step([(run, 5)])
    path.step([(run, 1)])
    path.step([(run, len(TOKENS) - 6)])
    return torch.cat(run.logits)


def test_mxfp4_as_it_is_published(tmp_path: Path) -> None:
    """transformers makes the same numbers of it; held as it is stored, and dense, it serves what these give."""
    from transformers import AutoModelForCausalLM

    save_model(tmp_path / "model", WIDE)
    in_mxfp4(tmp_path / "model", tmp_path / "exact")
    expected_TV = ReferenceModel.load(tmp_path / "exact").logits(TOKENS)
    torch.testing.assert_close(ReferenceModel.load(tmp_path / "model").logits(TOKENS), expected_TV, atol=0, rtol=0)
    torch.testing.assert_close(served(tmp_path / "model"), expected_TV, atol=1e-5, rtol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs_TV = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(theirs_TV, expected_TV, atol=1e-5, rtol=1e-5)
    spec = with_weights(load_spec(tmp_path / "model"), tmp_path / "model", "auto")
    assert spec.experts.label == "mxfp4-g32"
    held = load_experts(tmp_path / "model", spec, dtype=torch.float32, device=CPU)
    assert isinstance(held[0].w_gate_up_E2FD, QuantisedWeight)
    dense = load_experts(tmp_path / "exact", load_spec(tmp_path / "exact"), dtype=torch.float32, device=CPU)
    x_TD, ids_TK, weights_TK = torch.randn(5, 96), torch.arange(10).view(5, 2) % 4, torch.rand(5, 2)
    outputs = [
        ExpertShard(layers, num_experts=4, activation="swiglu_oai").forward(1, x_TD, ids_TK, weights_TK)
        for layers in (held, dense)
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for layer, weights in held.items():
        assert weights.nbytes == expert_bytes(spec, 4) / 4, layer


@pytest.mark.parametrize("size", [-400.0, 400.0])
def test_sinks_may_be_far_from_all_scores(tmp_path: Path, size: float) -> None:
    """They take nothing, or all: e to the power of 400 is no float32."""
    save_model(tmp_path, GPT_OSS)
    names = [f"model.layers.{layer}.self_attn.sinks" for layer in range(4)]
    change(tmp_path, lambda tensors: tensors.update({name: torch.full((4,), size) for name in names}))
    expected_TV = ReferenceModel.load(tmp_path).logits(TOKENS)
    assert expected_TV.isfinite().all()
    torch.testing.assert_close(served(tmp_path), expected_TV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
def test_numbers_can_be_rounded(tmp_path: Path, form: Any) -> None:
    save_model(tmp_path, WIDE)
    spec = with_weights(load_spec(tmp_path), tmp_path, form)
    held = load_experts(tmp_path, spec, dtype=torch.float32, device=CPU)
    assert isinstance(held[2].w_down_EDF, QuantisedWeight)
    exact = ReferenceModel.load(tmp_path, expert_format=form)._tensors
    x_TD, one = torch.randn(3, 96), torch.ones(3, 1)
    for expert in range(4):
        found = ExpertShard(held, num_experts=4, activation="swiglu_oai").forward(
            2, x_TD, torch.full((3, 1), expert), one
        )
        gate, up, down = (
            [exact[f"{PREFIX.format(2)}{expert}.{part}_proj.{end}"] for end in ("weight", "bias")]
            for part in ("gate", "up", "down")
        )
        g_TF = (x_TD @ gate[0].T + gate[1]).clamp(max=7)
        u_TF = (x_TD @ up[0].T + up[1]).clamp(-7, 7)
        wanted = ((u_TF + 1) * g_TF * torch.sigmoid(1.702 * g_TF)) @ down[0].T + down[1]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_slices_add_up(tmp_path: Path) -> None:
    """Also where one of them has no bias of the down projection, which is there once."""
    save_model(tmp_path, GPT_OSS)
    whole = load_experts(tmp_path, load_spec(tmp_path), dtype=torch.float32, device=CPU)[1]
    x_TD, ids_TK, weights_TK = torch.randn(6, 32), torch.arange(12).view(6, 2) % 8, torch.rand(6, 2)

    def output(weights: ExpertWeights) -> Tensor:
        return ExpertShard({1: weights}, num_experts=8, activation="swiglu_oai").forward(1, x_TD, ids_TK, weights_TK)

    parts = [output(sliced(whole, index, 3)) for index in range(3)]
    torch.testing.assert_close(sum(parts), output(whole), atol=1e-5, rtol=1e-5)


def renamed(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}s"] = tensors.pop(name)


def shorter(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, 1:].contiguous()


def whole_numbers(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].int()


GATE_UP = PREFIX.format(1) + "gate_up_proj"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor], str], None], str, str]] = {
    "no bias of experts": (renamed, f"{GATE_UP}_bias", rf'lacks "{GATE_UP}_bias" \(.*\[8, 36\]\)'),
    "no matrix": (renamed, GATE_UP, rf'lacks "{GATE_UP}" \(.*\[8, 32, 36\]\)'),
    "no sinks": (renamed, "model.layers.2.self_attn.sinks", r'lacks 1 tensor \("model.layers.2.self_attn.sinks"\)'),
    "no bias of the router": (renamed, "model.layers.0.mlp.router.bias", "lacks 1 tensor"),
    "no bias of queries": (renamed, "model.layers.0.self_attn.q_proj.bias", "lacks 1 tensor"),
    "another shape": (shorter, f"{GATE_UP}_bias", r"\[8, 36\]\), found F32 \[8, 35\]"),
    "another type": (whole_numbers, GATE_UP, r"found I32 \[8, 32, 36\]"),
}


@pytest.mark.parametrize(("edit", "name", "words"), WRONG.values(), ids=WRONG)
def test_tensors_that_are_missing_or_wrong_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor], str], None], name: str, words: str
) -> None:
    save_model(tmp_path, GPT_OSS)
    change(tmp_path, lambda tensors: edit(tensors, name))
    with pytest.raises((CheckpointError, UnsupportedModel), match=words), Checkpoint(tmp_path, load_spec(tmp_path)):
        pass


def test_a_config_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", WIDE)
    plain = load_file(tmp_path / "model" / WEIGHTS)
    in_mxfp4(tmp_path / "model", tmp_path / "exact")
    config = json.loads((tmp_path / "model/config.json").read_text())
    configure(tmp_path / "model", None)
    with pytest.raises(CheckpointError, match="is of a quantised checkpoint, expected a quantization_config"):
        ReferenceModel.load(tmp_path / "model")
    configure(tmp_path / "exact", config["quantization_config"])
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\" is MXFP4 by quantization_config .* as numbers"):
        ReferenceModel.load(tmp_path / "exact")
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    change(tmp_path / "model", lambda tensors: tensors.update({GATE_UP: plain[GATE_UP]}))
    with pytest.raises(CheckpointError, match=f'no place for 1 tensor .*"{GATE_UP}"'):
        ReferenceModel.load(tmp_path / "model")


def test_slices_and_widths_that_no_form_has_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, GPT_OSS)
    with pytest.raises(ConfigError, match="cannot be held in mxfp4: expected columns in a multiple of 16"):
        with_weights(load_spec(tmp_path), tmp_path, "mxfp4")


def test_tokens_that_end_an_answer_are_those_of_the_generation_config(tmp_path: Path) -> None:
    save_model(tmp_path, GPT_OSS)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [90, 91, 200_012]}))
    assert load_spec(tmp_path).eos_token_ids == (90, 91)
    (tmp_path / "generation_config.json").unlink()
    assert load_spec(tmp_path).eos_token_ids == (7,)
