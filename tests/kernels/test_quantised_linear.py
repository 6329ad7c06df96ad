"""A linear layer whose matrix is held quantised: what it returns with the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.models.guarded import guarded
from testkit.models.moe_layers import CODE_ROUNDINGS
from testkit.models.quantised import KINDS, random_weight
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, QuantisedWeight, dequantize_experts, quantised_linear
from moe_kernels.linear import launch

FORMS = [kind for kind in KINDS if "order" not in kind]
HALVES = [kind for kind in FORMS if kind in ("int4 g128", "int4 g64 zeros", "int4 g32", "e4m3 4x128", "e2m1 g32")]


def rows(count: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def exact(x_TI: Tensor, weight: QuantisedWeight, bias_O: Tensor | None = None) -> Tensor:
    y_TO = x_TI.double() @ dequantize_experts(weight, torch.float64)[0].T
    return y_TO if bias_O is None else y_TO + bias_O.double()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for dtype in (torch.float32, torch.bfloat16) for kind in (FORMS, HALVES)[dtype.itemsize == 2]]
    + [("int4 g128 zeros", torch.float16), ("e4m3 channel", torch.float16)],
)
def test_equals_the_weights_numbers(kind: str, dtype: torch.dtype) -> None:
    """272 columns end inside of a run of the layout and of a group; 72 rows fill no tile."""
    weight, x_TI, bias_O = random_weight(kind, 1, 72, 272), rows(5, 272, dtype), rows(72, 1, dtype)[:, 0]
    found_TO = quantised_linear(x_TI, weight, bias_O)
    assert found_TO.dtype == dtype
    assert_close(found_TO, exact(x_TI, weight, bias_O), CODE_ROUNDINGS[dtype])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("count", [0, 1, 16, 17, 65, 130])
def test_any_number_of_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few, of several blocks of them, and of so many that the matrix becomes numbers first."""
    monkeypatch.setattr(launch, "MAX_ROWS", 129)
    weight, x_TI = random_weight("int4 g128", 1, 32, 256), rows(count, 256)
    assert_close(quantised_linear(x_TI, weight), exact(x_TI, weight), CODE_ROUNDINGS[torch.float32])


@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize("biased", [False, True])
def test_columns_may_be_divided_among_programs(biased: bool, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_kernels import backend

    monkeypatch.setattr(launch, "PROGRAMS", programs)
    assert launch._depth(640, 1) == (640 if programs == 1 else 128)
    weight, x_TI = random_weight("int8 g128", 1, 64, 640), rows(3, 640)
    bias_O = rows(64, 1)[:, 0] if biased else None
    with backend.forced("triton"):
        assert_close(quantised_linear(x_TI, weight, bias_O), exact(x_TI, weight, bias_O), CODE_ROUNDINGS[torch.float32])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", ["int4 g64 zeros", "int8 channel", "e4m3 4x128", "e2m1 g32"])
def test_nothing_past_the_tensors_is_touched(kind: str) -> None:
    weight, x_TI, bias_O = random_weight(kind, 1, 72, 272), rows(5, 272, torch.float16), rows(72, 1).half()[:, 0]
    parts = {name: guarded(part) for name, part in weight.tensors().items()}
    found_TO = quantised_linear(guarded(x_TI), replace(weight, **parts), guarded(bias_O))
    assert_close(found_TO, exact(x_TI, weight, bias_O), CODE_ROUNDINGS[torch.float16])


@pytest.mark.usefixtures("path")
def test_nan_stays_in_its_row() -> None:
    x_TI = rows(4, 128)
    x_TI[2, 5] = torch.nan
    found_TO = quantised_linear(x_TI, random_weight("int4 g128", 1, 16, 128))
    assert found_TO.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.usefixtures("path")
def test_rows_that_are_not_contiguous() -> None:
    weight, wide_TI = random_weight("int4 g128", 1, 16, 128), rows(4, 256)
    assert_close(quantised_linear(wide_TI[:, ::2], weight), exact(wide_TI[:, ::2], weight), 64)


@pytest.mark.usefixtures("path")
def test_bad_arguments_are_named() -> None:
    weight, x_TI = random_weight("int4 g128", 1, 16, 128), rows(2, 128)
    cases = {
        r"x must be \[T, I\] in .*found": lambda: quantised_linear(x_TI[0], weight),
        r"x \[T, I\] must be": lambda: quantised_linear(rows(2, 64), weight),
        "weight must be one matrix, found 2 of 16 x 128": lambda: quantised_linear(
            x_TI, random_weight("int4 g128", 2, 16, 128)
        ),
        "weight must have its columns in x's order": lambda: quantised_linear(
            x_TI, random_weight("int4 g64 order", 1, 16, 128)
        ),
        r"bias \[O\] must be": lambda: quantised_linear(x_TI, weight, torch.zeros(8)),
        "quantised_linear": lambda: quantised_linear(x_TI.clone().requires_grad_(), weight),
        "weight must be a QuantisedWeight": lambda: quantised_linear(x_TI, x_TI),  # type: ignore[arg-type]
    }
    for words, call in cases.items():
        with pytest.raises((ArgumentError, TypeError), match=words):
            call()
