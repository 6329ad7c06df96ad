"""Weights that are drawn from a config alone, in the places of those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from testkit.models.checkpoints import FAMILIES, save_checkpoint

from services.model.load_spec import load_spec
from services.model.weight_source import FromCheckpoint, RandomWeights
from services.model.weights import load_dense, load_experts

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_have_the_shapes_of_a_checkpoint_and_need_none(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family)
    spec = load_spec(folder)
    real = load_dense(folder, spec, dtype=torch.bfloat16, device=CPU)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    drawn = load_dense(folder, spec, dtype=torch.bfloat16, device=CPU, source=RandomWeights())
    assert [_shapes(layer) for layer in drawn.layers] == [_shapes(layer) for layer in real.layers]
    experts = load_experts(folder, spec, dtype=torch.bfloat16, device=CPU, source=RandomWeights())
    assert experts.keys() == set(spec.moe_layers)
    held = experts[spec.moe_layers[0]]
    assert held.w_down_EDF.shape == (spec.num_experts, spec.hidden_size, spec.expert_ffn)
    assert held.w_down_EDF.float().std().item() == pytest.approx(spec.expert_ffn**-0.5, rel=0.1)
    assert not torch.equal(held.w_down_EDF[0], held.w_down_EDF[1])


def _shapes(layer: object) -> dict[str, object]:
    names = layer.__slots__  # type: ignore[attr-defined]
    return {
        name: getattr(getattr(layer, name), "shape", getattr(layer, name) is None) for name in names if name != "ffn"
    }


def test_equal_seeds_draw_equal_weights(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe")
    spec = RandomWeights().spec(folder, "auto")

    def router(seed: int) -> torch.Tensor:
        found = (
            load_dense(folder, spec, dtype=torch.float32, device=CPU, source=RandomWeights(seed)).layers[0].router_ED
        )
        assert found is not None
        return found

    assert torch.equal(router(1), router(1))
    assert not torch.equal(router(1), router(2))
    assert not spec.weights, "no weights were read"
    assert FromCheckpoint().spec(folder, "auto").weights
