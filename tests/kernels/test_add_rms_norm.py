"""The residual sum and the norm after it, against their definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.guarded import guarded
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, backend
from moe_kernels.add_rms_norm.op import add_rms_norm

both_paths = pytest.mark.usefixtures("path")
EPS = 1e-6


def random_rows(rows: int, hidden: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + hidden)
    return [torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(count)]


def defined(sum_TD: Tensor, weight_D: Tensor, eps: float = EPS) -> Tensor:
    exact_TD = sum_TD.double()
    return exact_TD / (exact_TD.square().mean(dim=1, keepdim=True) + eps).sqrt() * weight_D.double()


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("added", [0, 1, 2])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (17, 100), (3, 1), (2, 2048)])
def test_equals_the_definition(rows: int, hidden: int, added: int, dtype: torch.dtype) -> None:
    x_TD, *others = random_rows(rows, hidden, dtype, 1 + added)
    weight_D = random_rows(1, hidden, dtype, 1)[0][0]
    y_TD, z_TD = [*others, None, None][:2]
    sum_TD, h_TD = add_rms_norm(x_TD, y_TD, weight_D, EPS, z_TD=z_TD)
    assert sum_TD.dtype == h_TD.dtype == dtype
    assert_close(sum_TD, x_TD.double() + sum(other.double() for other in others))
    assert_close(h_TD, defined(sum_TD, weight_D))


@both_paths
def test_sums_are_rounded_one_after_the_other_as_torch_rounds_them() -> None:
    """In float16, which the interpreter rounds to nearest; of the 3000 elements some differ if z is added last."""
    x_TD, y_TD, z_TD = random_rows(30, 100, torch.float16, 3)
    sum_TD, _ = add_rms_norm(x_TD, y_TD, torch.ones(100).half(), EPS, z_TD=z_TD)
    assert torch.equal(sum_TD, x_TD + (y_TD + z_TD))
    assert not torch.equal(sum_TD, (x_TD + y_TD) + z_TD)


@both_paths
def test_the_norm_reads_the_rounded_sum() -> None:
    """Else a quarter of the elements were rounded to another number of float16."""
    x_TD, y_TD = random_rows(30, 100, torch.float16, 2)
    sum_TD, h_TD = add_rms_norm(x_TD, y_TD, torch.ones(100).half(), EPS)
    assert float((h_TD != defined(sum_TD, torch.ones(100)).half()).double().mean()) < 0.01


@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    x_TD, y_TD = random_rows(3, 40, torch.float32, 2)
    x_TD[1, 7] = value
    sum_TD, h_TD = add_rms_norm(x_TD, y_TD, torch.ones(40), EPS)
    assert h_TD[1, 7].isnan()
    for row in (0, 2):
        assert_close(h_TD[row], defined(sum_TD, torch.ones(40))[row])


@both_paths
def test_a_row_depends_on_no_other() -> None:
    x_TD, y_TD = random_rows(9, 100, torch.float32, 2)
    together = add_rms_norm(x_TD, y_TD, torch.ones(100), EPS)
    for row in range(9):
        alone = add_rms_norm(x_TD[row : row + 1], y_TD[row : row + 1], torch.ones(100), EPS)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


@both_paths
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_eps_counts(eps: float) -> None:
    (x_TD,) = random_rows(2, 30, torch.float32, 1)
    x_TD *= 1e-3
    assert_close(add_rms_norm(x_TD, None, torch.ones(30), eps)[1], defined(x_TD, torch.ones(30), eps))


@both_paths
def test_rows_with_strides() -> None:
    """Slices of wider rows, each with a stride of its own, and one of every third column."""
    wide = random_rows(5, 70, torch.float32, 3)
    x_TD, y_TD, z_TD = wide[0][:, :20], wide[1][:, 3:23], wide[2][:, ::3][:, :20]
    sum_TD, h_TD = add_rms_norm(x_TD, y_TD, torch.ones(20), EPS, z_TD=z_TD)
    assert torch.equal(sum_TD, x_TD + (y_TD + z_TD))
    assert_close(h_TD, defined(sum_TD, torch.ones(20)))
    assert sum_TD.is_contiguous()


@both_paths
def test_without_rows_and_without_anything_to_add() -> None:
    assert [part.shape for part in add_rms_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), EPS)] == [
        (0, 8)
    ] * 2
    x_TD = torch.ones(2, 8)
    assert add_rms_norm(x_TD, None, torch.ones(8), EPS)[0] is x_TD


@both_paths
def test_the_worked_example() -> None:
    x_TD, y_TD = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    sum_TD, h_TD = add_rms_norm(x_TD, y_TD, torch.tensor([1.0, 2.0]), 0.0)
    assert sum_TD.tolist() == [[3, 4]]
    assert_close(h_TD, torch.tensor([[0.6 * 2**0.5, 1.6 * 2**0.5]]))


@both_paths
def test_inputs_stay_as_they_are() -> None:
    x_TD, y_TD, z_TD = random_rows(2, 8, torch.float32, 3)
    before = [tensor.clone() for tensor in (x_TD, y_TD, z_TD)]
    add_rms_norm(x_TD, y_TD, torch.ones(8), EPS, z_TD=z_TD)
    assert all(torch.equal(one, other) for one, other in zip(before, (x_TD, y_TD, z_TD), strict=True))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 20), st.integers(1, 300))
def test_nothing_is_touched_past_any_tensor(rows: int, hidden: int) -> None:
    x_TD, y_TD, z_TD = (guarded(part) for part in random_rows(rows, hidden, torch.float16, 3))
    with backend.forced("triton"):
        sum_TD, h_TD = add_rms_norm(x_TD, y_TD, guarded(torch.ones(hidden).half()), EPS, z_TD=z_TD)
    assert_close(h_TD, defined(sum_TD, torch.ones(hidden)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_TD": torch.zeros(3)}, r"x must be \[T, D\]"),
        ({"x_TD": torch.zeros(2, 4, dtype=torch.float64)}, "x must be"),
        ({"x_TD": None}, "x must be a tensor, found None"),
        ({"y_TD": torch.zeros(2, 5)}, r"y \[T, D\] must be"),
        ({"y_TD": torch.zeros(2, 4).half()}, r"y \[T, D\] must be torch.float32"),
        ({"y_TD": [[1.0]]}, "y must be a tensor"),
        ({"z_TD": torch.zeros(1, 4)}, r"z \[T, D\] must be"),
        ({"y_TD": None}, "without y there must be no z"),
        ({"weight_D": torch.zeros(5)}, r"weight \[D\] must be"),
        ({"weight_D": torch.zeros(4).half()}, r"weight \[D\] must be torch.float32"),
        ({"x_TD": torch.zeros(2, 4, requires_grad=True)}, "no backward pass"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str) -> None:
    given = {
        "x_TD": torch.zeros(2, 4), "y_TD": torch.zeros(2, 4), "weight_D": torch.ones(4), "z_TD": torch.zeros(2, 4)
    } | change  # fmt: skip
    with pytest.raises(ArgumentError, match=words):
        add_rms_norm(eps=EPS, **given)


def test_tensors_on_two_devices() -> None:
    with pytest.raises(ArgumentError, match="weight is on meta, x on cpu"):
        add_rms_norm(torch.zeros(2, 4), None, torch.ones(4, device="meta"), EPS)
