"""combine on what does not fit, and on layouts that kernels do not take as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_kernels import ArgumentError, combine

pytestmark = pytest.mark.usefixtures("path")

OUT_SD = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
PLACE_TK = torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32)
WEIGHTS_TK = torch.tensor([[0.5, 2.0], [3.0, 4.0]])
Y = [[52, 104], [40, 80]]


@pytest.mark.parametrize("place", [3, 2**30, -2, -(2**31)])
def test_places_that_do_not_exist_add_nothing(place: int) -> None:
    assert combine(OUT_SD, torch.tensor([[2, 0], [place, 1]], dtype=torch.int32), WEIGHTS_TK).tolist() == Y
    assert combine(OUT_SD[:0], torch.full((2, 2), place, dtype=torch.int32), WEIGHTS_TK).tolist() == [[0, 0], [0, 0]]


def test_places_may_be_int64() -> None:
    assert combine(OUT_SD, torch.tensor([[2, 0], [2**32 + 1, 1]]), WEIGHTS_TK).tolist() == Y


@pytest.mark.parametrize("name", ["out", "place", "weights"])
def test_any_strides(name: str) -> None:
    given = {"out": OUT_SD, "place": PLACE_TK, "weights": WEIGHTS_TK}
    given[name] = given[name].t().contiguous().t()
    assert combine(given["out"], given["place"], given["weights"]).tolist() == Y


def test_empty() -> None:
    assert combine(OUT_SD, PLACE_TK[:0], WEIGHTS_TK[:0]).shape == (0, 2)
    assert combine(OUT_SD[:, :0], PLACE_TK, None).shape == (2, 0)


@pytest.mark.parametrize("path", ["torch"])  # before one is chosen
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": OUT_SD[0]}, r"out must be \[S, D\].*\(2,\)"),
        ({"out": OUT_SD.int()}, r"out must be .*int32 of shape \(3, 2\)"),
        ({"place": PLACE_TK[0]}, r"place must be \[T, K\].*\(2,\)"),
        ({"place": PLACE_TK.float()}, r"place must be .*float32 of shape \(2, 2\)"),
        ({"place": PLACE_TK.to("meta")}, "place is on meta, out on cpu"),
        ({"weights": WEIGHTS_TK[:1]}, r"weights must be .*\(2, 2\), found .*\(1, 2\)"),
        ({"weights": WEIGHTS_TK.double()}, r"weights must be torch.float32 .*float64 of shape \(2, 2\)"),
        ({"weights": WEIGHTS_TK.to("meta")}, "weights is on meta, out on cpu"),
        ({"out": OUT_SD.clone().requires_grad_()}, r"out \(.*\(3, 2\)\) requires a gradient: use parallel_linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str) -> None:
    given = {"out": OUT_SD, "place": PLACE_TK, "weights": WEIGHTS_TK, **changes}
    with pytest.raises(ArgumentError, match=words):
        combine(given["out"], given["place"], given["weights"])
