"""fused_moe, every way through, against the definition: shapes, dtypes, activations, biases, where the weights act."""

from __future__ import annotations

import pytest
import torch
from testkit.models.moe_layers import ACTIVATIONS, DTYPES, exact_layer, random_layer
from testkit.models.regimes import REGIMES
from testkit.models.tolerances import assert_close

from moe_kernels import fused_moe

pytestmark = pytest.mark.usefixtures("regime")

SHAPES = [
    # rows, hidden, width, experts, slots
    (1, 64, 32, 8, 2),
    (2, 48, 40, 3, 3),
    (7, 64, 32, 8, 8),
    (33, 48, 24, 16, 3),
    (100, 32, 16, 4, 1),
    (3, 40, 24, 60, 4),
    (1, 17, 50, 9, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("regime", "shape"),
    [(regime, shape) for regime in REGIMES for shape in SHAPES if regime != "gemv" or shape[0] < 5],
    ids=str,
)
def test_equals_the_definition(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    layer = random_layer(*shape, dtype=dtype)
    y_TD = layer()
    assert y_TD.dtype == dtype
    assert_close(y_TD, layer.expected())


@pytest.mark.parametrize(("hidden", "width"), [(5, 3), (17, 9), (18, 10), (16, 3), (3, 16), (1, 1), (72, 40)])
def test_widths_that_are_not_aligned(rows: int, hidden: int, width: int) -> None:
    for dtype in (torch.float32, torch.float16):
        layer = random_layer(rows, hidden, width, 6, 3, dtype=dtype)
        assert_close(layer(), layer.expected())


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_biases_weights(activation: str, biased: bool, weights_on: str) -> None:
    layer = random_layer(4, activation=activation, biased=biased).but(weights_on=weights_on)
    assert_close(layer(), layer.expected())


def test_weights_on_the_input_round_the_product_once() -> None:
    layer = exact_layer(9, slots=1, dtype=torch.float16)
    weights_T1 = torch.rand(9, 1, generator=torch.Generator().manual_seed(2))
    # Each expert turns its row, which changes no number.
    want_TD = layer.but(x_TD=(layer.x_TD.float() * weights_T1).half(), weights_TK=torch.ones(9, 1))()
    assert torch.equal(layer.but(weights_TK=weights_T1, weights_on="input")(), want_TD)


def test_one_of_the_biases(rows: int) -> None:
    layer = random_layer(rows, biased=True)
    for part in (layer.but(bias_in=None), layer.but(bias_down=None)):
        assert_close(part(), part.expected())


@pytest.mark.parametrize("activation", ["swiglu_oai", "gelu", "relu"])
def test_large_activations_clamp_and_saturate(activation: str) -> None:
    layer = random_layer(5, activation=activation)
    layer = layer.but(x_TD=layer.x_TD * 30)
    assert_close(layer(), layer.expected())


def test_example_of_the_docstring() -> None:
    y_TD = fused_moe(
        torch.tensor([[2.0]]),
        torch.tensor([[[1.0], [3.0]]]),
        torch.tensor([[[5.0]]]),
        torch.tensor([[0]]),
        torch.tensor([[0.5]]),
    )
    torch.testing.assert_close(y_TD, torch.tensor([[26.424]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(dtype: torch.dtype) -> None:
    y_TD = random_layer(0, dtype=dtype)()
    assert y_TD.shape == (0, 24)
    assert y_TD.dtype == dtype
