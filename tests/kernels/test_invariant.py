"""Products that treat each row by itself: against the definition, and that nothing of a launch depends on the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.models.moe_layers import DTYPES, random_layer
from testkit.models.tolerances import assert_close
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import ArgumentError, backend, fused_moe
from moe_kernels.invariant import op as invariant
from moe_kernels.invariant.reference import ROWS, SERIAL, in_whole_vectors

both_paths = pytest.mark.usefixtures("path")
COUNTS = (1, 2, 3, 15, 16, 17, 40, 65)


def _rows(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + rows + width)).to(dtype)


@both_paths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 32), (17, 100, 36), (70, 33, 5), (64, 8, 130)])
def test_linear_equals_the_definition(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x_TI, w_OI, bias_O = _rows(rows, inputs, dtype), _rows(outputs, inputs, dtype, 1), _rows(1, outputs, dtype, 2)[0]
    exact = x_TI.double() @ w_OI.double().t()
    found = invariant.linear(x_TI, w_OI)
    assert found.dtype == dtype
    assert_close(found, exact)
    assert_close(invariant.linear(x_TI, w_OI, bias_O), exact + bias_O.double())


@both_paths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 32, 8, 2), (33, 48, 24, 16, 3), (100, 32, 16, 4, 1), (7, 17, 50, 9, 8)])
def test_experts_equal_the_definition(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    layer = random_layer(*shape, dtype=dtype)
    arguments: tuple[Any, ...] = layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK
    assert_close(invariant.experts(*arguments), layer.expected())


def _biased(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A layer as gpt-oss's, and the arguments that it takes more."""
    layer = random_layer(33, 48, 24, 16, 3, dtype=dtype, activation="swiglu_oai", biased=True)
    return layer, {name: getattr(layer, name) for name in ("activation", "bias_in", "bias_down")}


@both_paths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_with_biases_and_a_clamped_activation(dtype: torch.dtype) -> None:
    layer, flags = _biased(dtype)
    found = invariant.experts(layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK, **flags)
    assert_close(found, layer.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_such_rows_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    layer, flags = _biased(dtype)
    rows, weights = (layer.x_TD, layer.ids_TK, layer.weights_TK), (layer.w_in, layer.w_down)
    whole = invariant.experts(rows[0], *weights, *rows[1:], **flags)
    alone = [
        invariant.experts(x_1D, *weights, ids_1K, weights_1K, **flags)
        for x_1D, ids_1K, weights_1K in zip(*(part.split(1) for part in rows), strict=True)
    ]
    assert torch.equal(torch.cat(alone), whole)


def test_experts_that_are_not_gated_are_refused() -> None:
    layer = random_layer(3, 48, 24, 16, 3, activation="relu")
    arguments: tuple[Any, ...] = layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK
    with pytest.raises(ArgumentError, match="activation must be gated, found 'relu'"):
        invariant.experts(*arguments, activation="relu")


@both_paths
def test_experts_elsewhere_add_nothing() -> None:
    layer = random_layer(9, hidden=32, width=16, experts=4, slots=2)
    elsewhere = torch.tensor([2, -1, 0, -1, 3, 1, -1], dtype=torch.int32)
    ids_TK = layer.ids_TK + 1
    ids_TK[3] = -1
    ids_TK[4] = 9
    arguments: tuple[Any, ...] = layer.x_TD, layer.w_in, layer.w_down, ids_TK, layer.weights_TK
    found = invariant.experts(*arguments, local_E=elsewhere)
    assert_close(found, fused_moe(*arguments, local_E=elsewhere))
    assert not found[3:5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 48), (33, 7), (256, 512)])
def test_bits_of_a_row_do_not_depend_on_others(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """On the path of a CPU: the interpreter multiplies by numpy, whose rows depend on where they lie."""
    x_TI, w_OI = _rows(80, inputs, dtype), _rows(outputs, inputs, dtype, 1)
    whole = invariant.linear(x_TI, w_OI)
    for count in COUNTS:
        for first in (0, 5, 80 - count):
            assert torch.equal(invariant.linear(x_TI[first : first + count], w_OI), whole[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_do_not_depend_on_whose_experts_are_busy(dtype: torch.dtype) -> None:
    """Nor on whether its pairs are computed one by one, as expert workers do, and summed after that."""
    layer = random_layer(80, hidden=48, width=18, experts=6, slots=3, dtype=dtype)
    weights: tuple[Any, ...] = layer.w_in, layer.w_down
    whole = invariant.experts(layer.x_TD, *weights, layer.ids_TK, layer.weights_TK)
    for count in COUNTS:
        part = slice(80 - count, 80)
        found = invariant.experts(layer.x_TD[part], *weights, layer.ids_TK[part], layer.weights_TK[part])
        assert torch.equal(found, whole[part])
    x_SD, ids_S1 = layer.x_TD.repeat_interleave(3, dim=0), layer.ids_TK.reshape(-1, 1)
    pairs_TKD = invariant.experts(x_SD, *weights, ids_S1, torch.ones(240, 1)).view(80, 3, -1)
    total_TD = torch.zeros(80, 48)
    for slot in range(3):
        total_TD += pairs_TKD[:, slot] * layer.weights_TK[:, slot : slot + 1]
    assert torch.equal(total_TD.to(dtype), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [torch.exp, torch.sigmoid, F.silu, torch.cos])
def test_elements_take_the_same_instructions_wherever_they_lie(op: Any, dtype: torch.dtype) -> None:
    x = _rows(1, 2 * SERIAL + 77, dtype)[0] * 3
    whole = in_whole_vectors(op, x)
    assert_close(whole, op(x.double()))
    for first, count in ((0, 1), (5, 1), (3, 7), (70, 33), (SERIAL - 3, 9), (1, SERIAL + 1), (SERIAL, SERIAL + 77)):
        assert torch.equal(in_whole_vectors(op, x[first : first + count]), whole[first : first + count])


def test_torch_by_itself_does_not() -> None:
    """If this fails because torch has changed, what it holds may be simpler than it is."""
    x_TI, w_OI = _rows(ROWS, 96), _rows(48, 96, seed=1)
    assert not torch.equal(F.linear(x_TI[:1], w_OI), F.linear(x_TI, w_OI)[:1])
    x = _rows(1, 1007)[0]
    assert not torch.equal(torch.cat([torch.sigmoid(part) for part in x.split(1)]), torch.sigmoid(x))


def _launches(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Constants of the grouped kernel's launches for so many rows."""
    from moe_kernels.grouped_gemm import launch as grouped

    found: list[dict[str, Any]] = []
    kernel = grouped.grouped_gemm_kernel

    class Recorded:
        def __getitem__(self, grid: object) -> Any:
            def call(*arguments: Any, **constants: Any) -> None:
                found.append(constants)
                kernel[grid](*arguments, **constants)

            return call

    with monkeypatch.context() as patch, backend.forced("triton"):
        patch.setattr(grouped, "grouped_gemm_kernel", Recorded())
        layer = random_layer(rows, hidden=32, width=16, experts=4, slots=2)
        arguments: tuple[Any, ...] = layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK
        invariant.experts(*arguments)
        invariant.linear(layer.x_TD, _rows(48, 32))
    return found


def test_launches_do_not_depend_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled, and so the order of instructions, is one and the same."""
    wanted = _launches(1, monkeypatch)
    assert len(wanted) == 3
    for rows in (2, 64, 65, 300):
        assert _launches(rows, monkeypatch) == wanted


@both_paths
def test_without_rows() -> None:
    layer = random_layer(0, hidden=32, width=16, experts=4, slots=2)
    arguments: tuple[Any, ...] = layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK
    assert invariant.experts(*arguments).shape == (0, 32)
    assert invariant.linear(layer.x_TD, _rows(48, 32)).shape == (0, 48)


def test_what_does_not_fit_is_refused() -> None:
    x_TI, w_OI = _rows(3, 8), _rows(4, 8)
    for wrong in ((x_TI[0], w_OI), (x_TI, w_OI.t()), (x_TI, w_OI[:, :7].contiguous()), (x_TI, w_OI.half())):
        with pytest.raises(ArgumentError):
            invariant.linear(*wrong)
    with pytest.raises(ArgumentError, match="bias"):
        invariant.linear(x_TI, w_OI, torch.zeros(5))
    with pytest.raises(ArgumentError, match="no backward pass"):
        invariant.linear(x_TI, w_OI.requires_grad_())
