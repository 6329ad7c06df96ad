"""grouped_gemm against a loop over rows in float64: every way to gather, scatter, transpose and finish a row."""

from __future__ import annotations

import itertools

import pytest
import torch
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, combine, dequantize_experts, plan, quantize_experts
from moe_kernels.activations.op import Activation, activate
from moe_kernels.grouped_gemm.op import Gather, grouped_gemm

TILES = {"BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2, "num_warps": 4, "num_stages": 3}
ROWS, SLOTS, EXPERTS = 9, 2, 3


def by_row(
    x: Tensor, w: Tensor, ids: Tensor, gather: Gather, scatter: bool, activation: Activation, bias: Tensor | None,
    scale: Tensor | None, transpose: bool,
) -> Tensor:  # fmt: skip
    """One pair after another, in float64."""
    flat = ids.flatten().tolist()
    taken = [pair for expert in range(EXPERTS) for pair, chosen in enumerate(flat) if chosen == expert]
    order = taken + [pair for pair, chosen in enumerate(flat) if not 0 <= chosen < EXPERTS]
    out = []
    for place, pair in enumerate(order):
        source = {"token": pair // ids.shape[1], "pair": pair, None: place}[gather]
        expert = flat[pair] if place < len(taken) else None
        matrix = w[expert or 0].double()
        row = (matrix.T if transpose else matrix) @ x[source].double()
        if scale is not None:
            row = row * scale[pair].double()
        if bias is not None:
            row = row + bias[expert or 0].double()
        out.append(activate(row, activation) * (expert is not None))
    stacked = torch.stack(out)
    return torch.empty_like(stacked).index_copy_(0, torch.tensor(order), stacked) if scatter else stacked


def check(
    gather: Gather, scatter: bool, activation: Activation, *, dtype: torch.dtype = torch.float32, inner: int = 32,
    outer: int = 64, bias: bool = False, scale: bool = False, transpose: bool = False, persist: int = 0,
    ids: Tensor | None = None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(-1, EXPERTS + 1, (ROWS, SLOTS)) if ids is None else ids
    columns = 2 * outer if activation.startswith("swiglu") else outer
    w = (torch.randn(EXPERTS, inner, columns) if transpose else torch.randn(EXPERTS, columns, inner)).to(dtype) / 4
    x = torch.randn(ROWS if gather == "token" else ROWS * SLOTS, inner).to(dtype)
    b = torch.randn(EXPERTS, columns).to(dtype) if bias else None
    s = torch.rand(ROWS * SLOTS) if scale else None
    made = plan(ids, EXPERTS, block_rows=16)
    out = grouped_gemm(
        x, w, made, gather=gather, scatter=scatter, activation=activation, bias_EO=b, row_scale_S=s,
        transpose_w=transpose, tiles={**TILES, "PERSIST": persist},
    )  # fmt: skip
    assert out.dtype == dtype
    assert_close(out, by_row(x, w, ids, gather, scatter, activation, b, s, transpose))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("persist", [0, 1])
@pytest.mark.parametrize(("gather", "scatter"), [*itertools.product(("token", "pair", None), (False, True))])
def test_rows_from_anywhere_to_anywhere(gather: Gather, scatter: bool, persist: int) -> None:
    check(gather, scatter, "identity", persist=persist)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("activation", "bias", "scale"),
    [("swiglu", False, False), ("swiglu", True, True), ("swiglu_oai", True, False), ("gelu", True, False),
     ("gelu_tanh", False, True), ("relu", False, False), ("silu", True, True)],
)  # fmt: skip
def test_what_finishes_a_row(activation: Activation, bias: bool, scale: bool) -> None:
    check("token", False, activation, bias=bias, scale=scale)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transpose", [False, True])
def test_transposed_weights(transpose: bool, dtype: torch.dtype) -> None:
    check(None, True, "identity", transpose=transpose, inner=48, outer=40, dtype=dtype)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("inner", "outer"), [(33, 20), (1, 1), (40, 24), (17, 64), (64, 7)])
@pytest.mark.parametrize("transpose", [False, True])
def test_widths_that_fill_no_tile(inner: int, outer: int, transpose: bool) -> None:
    check("pair", False, "identity", inner=inner, outer=outer, transpose=transpose, dtype=torch.float16)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("chosen", [0, 2, -1, 7])
def test_all_rows_on_one_expert_or_on_none(chosen: int) -> None:
    check("token", True, "identity", ids=torch.full((ROWS, SLOTS), chosen))


@pytest.mark.usefixtures("path")
def test_absent_slots_are_neither_read_nor_weighed() -> None:
    out = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan], [10.0, 20.0]])
    place = torch.tensor([[2, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, torch.nan], [torch.inf, 1.0], [2.0, 4.0]])
    assert combine(out, place, weights).tolist() == [[5.0, 10.0], [0.0, 0.0], [42.0, 84.0]]
    assert combine(out, place, None).tolist() == [[10.0, 20.0], [0.0, 0.0], [11.0, 22.0]]


def test_what_does_not_fit_is_named() -> None:
    made = plan(torch.zeros(4, 2, dtype=torch.int64), 3)
    w = torch.zeros(3, 8, 16)
    with pytest.raises(ArgumentError, match=r"x must be \[4, 16\].*\(8, 16\)"):
        grouped_gemm(torch.zeros(8, 16), w, made, gather="token")
    with pytest.raises(ArgumentError, match=r"plan is for 3 experts.*\(2, 8, 16\)"):
        grouped_gemm(torch.zeros(8, 16), w[:2], made)
    with pytest.raises(ArgumentError, match=r"w must be torch.float16 like x"):
        grouped_gemm(torch.zeros(8, 16, dtype=torch.float16), w, made)
    with pytest.raises(ArgumentError, match=r"bias must be torch.float32 of shape \(3, 8\)"):
        grouped_gemm(torch.zeros(8, 16), w, made, bias_EO=torch.zeros(3, 9))


@pytest.mark.parametrize("path", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 0), (8, 128), (8, 0)])
@pytest.mark.usefixtures("path")
def test_dequantize_kernel_is_its_twin(bits: int, group: int, dtype: torch.dtype) -> None:
    q = quantize_experts(torch.randn(2, 19, 640, generator=torch.Generator().manual_seed(bits)), bits, group)
    from moe_kernels import backend

    with backend.forced("torch"):
        expected = dequantize_experts(q, dtype)
    assert torch.equal(dequantize_experts(q, dtype), expected)
