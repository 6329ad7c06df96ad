"""fused_moe against the loop over rows and slots, and its promises about order, absence and emptiness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import ArgumentError, fused_moe, reference

ROUNDINGS = 4
"""Spacings of the dtype, relative to the largest output."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(
    rows: int, hidden: int, width: int, experts: int, slots: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random ``x, w_gate_up, w_down, ids, weights``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    ids_TK = torch.rand(rows, experts, generator=generator).topk(slots, dim=1).indices
    weights_TK = torch.rand(rows, slots, generator=generator)
    x_TD = torch.randn(rows, hidden, generator=generator).to(dtype)
    return x_TD, normal(experts, 2 * width, hidden), normal(experts, hidden, width), ids_TK, weights_TK


def assert_equals_loop(arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    actual_TD, expected_TD = fused_moe(*arguments), reference.fused_moe(*arguments)
    tolerance = ROUNDINGS * torch.finfo(actual_TD.dtype).eps * float(expected_TD.abs().max())
    torch.testing.assert_close(actual_TD, expected_TD, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "experts", "slots"),
    [
        (1, 64, 32, 8, 2),
        (7, 64, 32, 8, 8),
        (33, 48, 24, 16, 3),
        (100, 32, 16, 4, 1),
        (3, 40, 24, 60, 4),
        (600, 16, 8, 5, 2),
    ],
)
def test_equals_loop(rows: int, hidden: int, width: int, experts: int, slots: int, dtype: torch.dtype) -> None:
    assert_equals_loop(layer(rows, hidden, width, experts, slots, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(5, 3), (17, 9), (18, 10), (16, 3), (3, 16), (1, 1)])
def test_widths_that_are_not_aligned(hidden: int, width: int, dtype: torch.dtype) -> None:
    assert_equals_loop(layer(19, hidden, width, 6, 3, dtype))


def test_example_of_the_docstring() -> None:
    y_TD = fused_moe(
        torch.tensor([[2.0]]),
        torch.tensor([[[1.0], [3.0]]]),
        torch.tensor([[[5.0]]]),
        torch.tensor([[0]]),
        torch.tensor([[0.5]]),
    )
    torch.testing.assert_close(y_TD, torch.tensor([[26.424]]), atol=1e-3, rtol=0)


@given(st.integers(0, 12), st.integers(1, 6), st.integers(0, 2**31), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_absent_experts_contribute_nothing(rows: int, slots: int, seed: int, absent: float) -> None:
    x_TD, w_gate_up, w_down, ids_TK, weights_TK = layer(rows, 16, 8, 6, slots, torch.float32, seed)
    gone_TK = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(seed)) < absent
    elsewhere_TK = ids_TK.masked_fill(gone_TK, -1)
    actual_TD = fused_moe(x_TD, w_gate_up, w_down, elsewhere_TK, weights_TK)
    expected_TD = reference.fused_moe(x_TD, w_gate_up, w_down, elsewhere_TK, weights_TK)
    torch.testing.assert_close(actual_TD, expected_TD, atol=1e-5, rtol=1e-5)
    assert (actual_TD[gone_TK.all(dim=1)] == 0).all()


def test_halves_of_the_experts_add_up() -> None:
    x_TD, w_gate_up, w_down, ids_TK, weights_TK = layer(20, 16, 8, 6, 3, torch.float32)
    whole_TD = fused_moe(x_TD, w_gate_up, w_down, ids_TK, weights_TK)
    low_TD = fused_moe(x_TD, w_gate_up[:3], w_down[:3], ids_TK.masked_fill(ids_TK >= 3, -1), weights_TK)
    high_TD = fused_moe(x_TD, w_gate_up[3:], w_down[3:], torch.where(ids_TK >= 3, ids_TK - 3, -1), weights_TK)
    torch.testing.assert_close(low_TD + high_TD, whole_TD, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 8, 16])
def test_sum_runs_in_slot_order(slots: int) -> None:
    """Exactly, to the bit: the outputs of single slots, weighted and added one after the other."""
    x_TD, w_gate_up, w_down, ids_TK, weights_TK = layer(50, 24, 8, 16, slots, torch.float32)
    # Integers make the matrix products exact, and gates this large make silu exact.
    x_TD, w_gate_up, w_down = x_TD.mul(4).round(), w_gate_up.mul(8).round(), w_down.mul(8).round()
    x_TD[:, 0], w_gate_up[:, :8], w_gate_up[:, :8, 0] = 1, 0, 128
    one = torch.ones(50, 1)
    expected_TD = torch.zeros_like(x_TD)
    for slot in range(slots):
        out_TD = fused_moe(x_TD, w_gate_up, w_down, ids_TK[:, slot : slot + 1], one)
        expected_TD = expected_TD + out_TD * weights_TK[:, slot : slot + 1]
    assert torch.equal(fused_moe(x_TD, w_gate_up, w_down, ids_TK, weights_TK), expected_TD)


def test_inputs_are_not_written_to() -> None:
    arguments = layer(9, 16, 8, 4, 2, torch.float32)
    before = [tensor.clone() for tensor in arguments]
    fused_moe(*arguments)
    assert all(torch.equal(old, new) for old, new in zip(before, arguments, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(dtype: torch.dtype) -> None:
    y_TD = fused_moe(*layer(0, 16, 8, 4, 2, dtype))
    assert y_TD.shape == (0, 16)
    assert y_TD.dtype == dtype


def test_wrong_arguments_are_named() -> None:
    x_TD, w_gate_up, w_down, ids_TK, weights_TK = layer(5, 16, 8, 4, 2, torch.float32)
    for arguments, words in [
        ((x_TD[0], w_gate_up, w_down, ids_TK, weights_TK), r"x must be \[T, D\]"),
        ((x_TD.double(), w_gate_up, w_down, ids_TK, weights_TK), "x must be"),
        ((x_TD, w_gate_up[:, :8], w_down, ids_TK, weights_TK), r"w_gate_up \[E, 2F, D\]"),
        ((x_TD, w_gate_up, w_down.half(), ids_TK, weights_TK), r"w_down \[E, D, F\]"),
        ((x_TD, w_gate_up, w_down[:, :4], ids_TK, weights_TK), r"w_down \[E, D, F\]"),
        ((x_TD, w_gate_up, w_down, ids_TK[:3], weights_TK), r"ids must be \[T=5, K\]"),
        ((x_TD, w_gate_up, w_down, ids_TK.int(), weights_TK), r"ids \[T, K\]"),
        ((x_TD, w_gate_up, w_down, ids_TK, weights_TK.half()), r"weights \[T, K\]"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            fused_moe(*arguments)
