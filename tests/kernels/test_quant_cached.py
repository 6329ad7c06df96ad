"""One expert's product on a CPU: what it returns, which experts it looks at, and what a weight keeps."""

from __future__ import annotations

import pytest
import torch
from testkit.models.quantised import KINDS, random_weight
from torch import Tensor

from moe_kernels import QuantisedWeight, dequantize_experts, fused_moe
from moe_kernels.quant import cached
from moe_kernels.quant.cached import SHARE, expert_product

WITHOUT_NUMBERS = [
    "int4 g128",
    "int4 channel",
    "int4 g32",
    "int4 g128 zeros",
    "int4 g64 zeros",
    "int4 channel zeros",
    "int8 channel",
]
"""Kinds that bfloat16 rows meet as codes."""


def rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_float32_rows_meet_exactly_the_weights_numbers(kind: str, count: int) -> None:
    """So a server in float32 answers as the reference does over dequantised weights."""
    q, x_NI = random_weight(kind, 2, 48, 256), rows(count, 256, torch.float32)
    assert torch.equal(expert_product(q, 1, x_NI), x_NI @ dequantize_experts(q)[1].T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "columns"), [(1, 256), (5, 256), (3, 208)])
def test_bfloat16_rows_are_rounded_once(kind: str, count: int, columns: int) -> None:
    """A relative error of 2^-8 at most in each weight or scale, and of the sum; the rows stay as they are."""
    q, x_NI = random_weight(kind, 2, 48, columns), rows(count, columns, torch.bfloat16)
    exact_NO = x_NI.double() @ dequantize_experts(q, torch.float64)[1].T
    assert (expert_product(q, 1, x_NI).double() - exact_NO).norm() < 2**-8 * exact_NO.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stay_codes_where_torch_has_a_product(kind: str) -> None:
    q = random_weight(kind, 2, 48, 256)
    expert_product(q, 0, rows(1, 256, torch.bfloat16))
    ((_, form),) = q.forms.kept.values()
    assert (form.nbytes < 48 * 256 * 2) == (kind in WITHOUT_NUMBERS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_forms_of_all_experts_fit(kind: str, dtype: torch.dtype) -> None:
    """So none is ever made a second time. They take the bytes of the numbers, or about those of the codes."""
    q = random_weight(kind, 6, 48, 256)
    for expert in range(6):
        expert_product(q, expert, rows(1, 256, dtype))
    assert len(q.forms.kept) == 6
    codes = dtype == torch.bfloat16 and kind in WITHOUT_NUMBERS
    most = SHARE * q.nbytes if codes else 6 * 48 * 256 * dtype.itemsize
    assert sum(form.nbytes for _, form in q.forms.kept.values()) <= most


def test_only_hit_experts_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once; rows of another dtype take the room of those before."""
    w_in, w_down = random_weight("e4m3 channel", 12, 64, 32), random_weight("e4m3 channel", 12, 32, 32)
    looked: list[int] = []
    values = cached.values

    def counted(one: QuantisedWeight) -> Tensor:
        looked.append(one.packed.data_ptr())
        return values(one)

    monkeypatch.setattr(cached, "values", counted)
    x_TD, weights_TK = rows(2, 32, torch.float32), torch.ones(2, 2)
    ids_TK = torch.tensor([[3, 7], [7, -1]])
    first = fused_moe(x_TD, w_in, w_down, ids_TK, weights_TK)
    assert looked == [part.packed[expert].data_ptr() for part in (w_in, w_down) for expert in (3, 7)]
    assert torch.equal(fused_moe(x_TD, w_in, w_down, ids_TK, weights_TK), first)
    assert len(looked) == 4
    for expert in range(12):
        expert_product(w_in, expert, x_TD.half())
    assert sum(form.nbytes for _, form in w_in.forms.kept.values()) <= 12 * 64 * 32 * 2
    assert (3, torch.float32) not in w_in.forms.kept
    assert (3, torch.float16) in w_in.forms.kept


@pytest.mark.parametrize(
    ("spare", "kept"), [(0, 4), (-1, 3), (-48 * 256 * 4, 3), (-48 * 256 * 4 - 1, 2), (-(1 << 40), 1)]
)
def test_a_host_that_can_spare_less_keeps_less(spare: int, kept: int) -> None:
    """As many bytes of the oldest forms go as are missing; the one that was made stays."""
    q = random_weight("e4m3 channel", 6, 48, 256)
    for expert in range(3):
        expert_product(q, expert, rows(1, 256, torch.float32))
    q.forms.spare = lambda: spare
    expert_product(q, 5, rows(1, 256, torch.float32))
    assert list(q.forms.kept) == [(expert, torch.float32) for expert in (0, 1, 2, 5)][-kept:]


def test_a_weight_that_is_written_to_is_read_again() -> None:
    q, x_NI = random_weight("int4 g128", 2, 48, 256), rows(2, 256, torch.bfloat16)
    before = expert_product(q, 1, x_NI)
    q.scales.mul_(2)
    assert torch.equal(expert_product(q, 1, x_NI), 2 * before)
    q.experts(1, 2).packed.fill_(0x88)
    assert not expert_product(q, 1, x_NI).any()


@pytest.mark.parametrize("kind", ["int4 g128", "e4m3 channel"])
def test_a_weight_of_inference_mode_is_read_each_time(kind: str) -> None:
    """Nothing counts the writes to it."""
    with torch.inference_mode():
        q, x_NI = random_weight(kind, 2, 48, 256), rows(2, 256, torch.bfloat16)
        before = expert_product(q, 1, x_NI)
        q.scales.mul_(2)
        assert torch.equal(expert_product(q, 1, x_NI), 2 * before)
    assert not q.forms.kept
