"""grouped_mlp, both paths: rows that arrive grouped, with the experts' counts on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.layouts import LAYOUTS, strided, tail
from testkit.models.moe_layers import ACTIVATIONS, DTYPES, Layer, exact_layer, expert_output, random_layer
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, grouped_mlp

pytestmark = pytest.mark.usefixtures("path")

COUNTS = [
    [3, 0, 5, 1, 0],
    [0, 0, 0, 0, 17],
    [9, 0, 0, 0, 0],
    [20, 1, 33, 2, 16],
    [0, 0, 0, 0, 0],
]


def run(layer: Layer, counts: list[int] | Tensor) -> Tensor:
    counts_E = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int32)
    flags = {"activation": layer.activation, "bias_in": layer.bias_in, "bias_down": layer.bias_down}
    return grouped_mlp(layer.x_TD, counts_E, layer.w_in, layer.w_down, **flags)


def by_definition(layer: Layer, counts: list[int]) -> Tensor:
    y_ND = torch.zeros(layer.x_TD.shape, dtype=torch.float64)
    start = 0
    for expert, count in enumerate(counts):
        y_ND[start : start + count] = expert_output(layer, expert, layer.x_TD[start : start + count])
        start += count
    return y_ND


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_equals_the_definition(counts: list[int], spare: int, dtype: torch.dtype) -> None:
    """Rows past the sum of the counts are NaN, and their results 0."""
    layer = random_layer(sum(counts) + spare, dtype=dtype)
    layer.x_TD[sum(counts) :] = torch.nan
    y_ND = run(layer, counts)
    assert y_ND.dtype == dtype
    assert_close(y_ND, by_definition(layer, counts))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, biased: bool) -> None:
    layer = random_layer(13, activation=activation, biased=biased)
    assert_close(run(layer, COUNTS[0]), by_definition(layer, COUNTS[0]))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 2**31))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_exact_experts_are_exact(counts: list[int], spare: int, seed: int) -> None:
    layer = exact_layer(sum(counts) + spare, experts=len(counts), slots=1, seed=seed)
    assert torch.equal(run(layer, counts).double(), by_definition(layer, counts))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
def test_nan_stays_in_its_row() -> None:
    layer = random_layer(72)
    clean_ND = run(layer, COUNTS[3])
    for at in (0, 20, 21, 71):
        x_ND = layer.x_TD.clone()
        x_ND[at, 3] = torch.nan
        y_ND = run(layer.but(x_TD=x_ND), COUNTS[3])
        others = torch.arange(72) != at
        assert torch.equal(y_ND[others], clean_ND[others])
        assert y_ND[at].isnan().any()


def test_twice_gives_the_same_bits() -> None:
    layer = random_layer(72, dtype=torch.float16)
    assert torch.equal(run(layer, COUNTS[3]), run(layer, COUNTS[3]))


def test_no_rows() -> None:
    assert run(random_layer(0), [0] * 5).shape == (0, 24)


def test_inputs_are_not_written_to() -> None:
    layer = random_layer(9, biased=True)
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    run(layer, COUNTS[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors().items())


def test_layouts_of_rows() -> None:
    layer = random_layer(9)
    for layout in LAYOUTS:
        assert_close(run(layer.but(x_TD=layout(layer.x_TD)), COUNTS[0]), by_definition(layer, COUNTS[0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_layouts_of_counts(dtype: torch.dtype) -> None:
    layer, counts_E = random_layer(9), torch.tensor(COUNTS[0], dtype=dtype)
    for layout in (strided, tail):
        assert_close(run(layer, layout(counts_E)), by_definition(layer, COUNTS[0]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_TD": torch.zeros(9)}, r"\bx\b.*\(9,\)"),
        ({"x_TD": torch.zeros(9, 23)}, r"\(9, 23\)|\(5, 24, 16\).*23|23.*\(5, 24, 16\)|\(5, 23, 16\)"),
        ({"x_TD": torch.zeros(9, 24, dtype=torch.float64)}, r"\bx\b.*float64"),
        ({"w_in": torch.zeros(5, 31, 24)}, r"w_in.*\(5, 31, 24\)"),
        ({"w_in": torch.zeros(5, 32, 24, device="meta")}, r"w_in.*meta"),
        ({"w_down": torch.zeros(5, 24, 16, dtype=torch.float16)}, r"w_down.*float16"),
        ({"bias_in": torch.zeros(5, 16)}, r"bias_in.*\(5, 16\)"),
        ({"bias_down": torch.zeros(4, 24)}, r"bias_down.*\(4, 24\)"),
        ({"activation": "tanh"}, "'tanh'"),
        ({"counts_E": torch.zeros(4, dtype=torch.int32)}, r"counts.*\(4,\)"),
        ({"counts_E": torch.zeros(5, 1, dtype=torch.int32)}, r"counts.*\(5, 1\)"),
        ({"counts_E": torch.zeros(5)}, r"counts.*float32"),
        ({"counts_E": torch.zeros(5, dtype=torch.int32, device="meta")}, r"counts.*meta"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    of_layer = {name: value for name, value in changes.items() if name != "counts_E"}
    with pytest.raises(ArgumentError, match=words):
        run(random_layer(9).but(**of_layer), changes.get("counts_E", COUNTS[0]))


@pytest.mark.parametrize(
    ("counts", "counted"),
    [
        pytest.param([3, 0, 50, 1, 7], [3, 0, 6, 0, 0], id="beyond the rows"),
        pytest.param([3, -2, 5, -1, 1], [3, 0, 5, 0, 1], id="negative"),
        pytest.param([2, 0, 2**62, 2**62, 0], [2, 0, 7, 0, 0], id="no sum could hold them"),
    ],
)
def test_counts_that_cannot_be_stay_inside(counts: list[int], counted: list[int]) -> None:
    """Counts are data: nobody can refuse them without waiting for the device, but no row past the end is touched."""
    layer = random_layer(9)
    counts_E = torch.tensor(counts, dtype=torch.int32 if max(counts) < 2**31 else torch.int64)
    assert_close(run(layer, counts_E), by_definition(layer, counted))
