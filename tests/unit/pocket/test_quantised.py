"""A model with quantised experts stays close to itself."""

from __future__ import annotations

import pytest
import torch
from testkit.pocket.evidence import CONFIG, lively

import moe_kernels as mk
from pocket_moe.config import tiny
from pocket_moe.errors import PocketError
from pocket_moe.model.model import PocketMoe
from pocket_moe.model.quantised import QuantisedExperts, quantise


@pytest.mark.parametrize(("bits", "group", "most"), [(8, 0, 0.02), (8, 128, 0.02), (4, 0, 0.35), (4, 128, 0.35)])
def test_logits_stay_close(bits: int, group: int, most: float) -> None:
    model, draw = lively(CONFIG, norms=0), torch.Generator().manual_seed(2)
    tokens_BL = torch.randint(4, CONFIG.vocab_size, (2, 40), generator=draw)
    with torch.no_grad():
        exact = model(tokens_BL)
        quantise(model, bits, group)
        error = float((model(tokens_BL) - exact).norm() / exact.norm())
    assert 0 < error < most


def test_the_experts_are_those_of_the_rounded_weights() -> None:
    model = lively(CONFIG, norms=0)
    _, mlp = next(model.moe_layers())
    exact_in = mlp.experts.w_in.detach().clone()
    size = quantise(model, 4, 128)
    assert isinstance(mlp.experts, QuantisedExperts)
    assert torch.equal(mk.dequantize_experts(mlp.experts.w_in), mk.dequantize_experts(mk.quantize_experts(exact_in, 4)))
    codes = CONFIG.num_hidden_layers * CONFIG.num_experts * 3 * 128 * 128 // 2
    assert codes < size < codes * 1.05
    # Another dtype for the rest of the model leaves codes and scales alone.
    with torch.no_grad():
        assert model.to(torch.bfloat16)(torch.tensor([[5, 6]])).dtype == torch.bfloat16
    assert mlp.experts.w_in.scales.dtype == torch.float16


def test_groups_that_are_not_offered_are_refused() -> None:
    with pytest.raises(PocketError, match="cannot be quantised"):
        quantise(PocketMoe(tiny()), 4, 48)
