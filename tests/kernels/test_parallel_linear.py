"""parallel_linear against a loop over pairs: the four combinations, gates, biases, absent experts, odd counts."""

from __future__ import annotations

import pytest
import torch
from testkit.models.layouts import transposed
from testkit.models.pair_layouts import LAYOUTS, OUTPUTS, Case, by_layout, case, linear, linear_by_pair, random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError
from moe_kernels.training.parallel_linear import parallel_linear

both_paths = pytest.mark.usefixtures("path")


def run(it: Case, layout: str, output: str, x: Tensor | None = None, *, bias: bool = True) -> Tensor:
    x = it.stored(layout) if x is None else x
    return linear(it, layout, output, x, it.w_EOI, it.bias_EO if bias else None, it.gates_TK)


def expected(it: Case, layout: str, output: str, *, bias: bool = True) -> Tensor:
    bias_EO = it.bias_EO if bias else None
    y_SO = linear_by_pair(it.stored(layout), it.w_EOI, bias_EO, it.ids_TK, it.plan, layout)
    return by_layout(y_SO, it.plan, it.gates_TK.double() if output == "gates" else None, output == "grouped")


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_loop(layout: str, output: str, dtype: torch.dtype) -> None:
    it = case(random_ids(13, 3, 5, absent=0.2), inputs=24, outputs=17, experts=5, dtype=dtype)
    for bias in (True, False):
        assert_close(run(it, layout, output, bias=bias), expected(it, layout, output, bias=bias))


@both_paths
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[2, 0]] * 40, id="two experts have all rows"),
        pytest.param([[3]] * 33, id="one expert has all rows"),
        pytest.param([[0, 3, 1]], id="one token"),
        pytest.param([[9, -1]] * 3, id="no expert here"),
        pytest.param([[9, 1]] * 17, id="every slot 0 is dropped"),
    ],
)
def test_uneven_experts(ids: list[list[int]]) -> None:
    it = case(ids, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    for layout in LAYOUTS:
        for output in OUTPUTS:
            assert_close(run(it, layout, output), expected(it, layout, output))


@both_paths
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_no_tokens(layout: str, output: str) -> None:
    it = case(torch.empty(0, 2), inputs=8, outputs=4, experts=3, dtype=torch.float32)
    x = it.stored(layout).requires_grad_()
    it.w_EOI.requires_grad_()
    y = run(it, layout, output, x)
    assert y.shape == (0, 4)
    dx, dw = torch.autograd.grad(y, [x, it.w_EOI], torch.ones_like(y))
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(dw))


@both_paths
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_rows_of_dropped_pairs_are_not_used(layout: str, output: str) -> None:
    ids = random_ids(9, 2, 4, absent=0.4)
    it = case(ids, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    assert (it.plan.place_S < 0).any()
    want = expected(it, layout, output)
    x, dropped_S = it.stored(layout), it.plan.place_S < 0
    if layout == "pair":
        x[dropped_S] = torch.nan
    elif layout == "grouped":
        x[int(it.plan.ends_E[-1]) :] = torch.nan
    it.gates_TK.view(-1)[dropped_S] = torch.nan
    assert_close(run(it, layout, output, x), want)


@both_paths
def test_nan_stays_in_its_token() -> None:
    it = case(random_ids(20, 2, 3), inputs=8, outputs=8, experts=3, dtype=torch.float32)
    want = expected(it, "token", "gates")
    it.x_TI[4, 0] = torch.nan
    want[4] = torch.nan
    assert_close(run(it, "token", "gates"), want)


@both_paths
def test_example_of_the_docstring() -> None:
    it = case([[1, 0]], inputs=1, outputs=1, experts=2, dtype=torch.float32)
    w_EOI, x = torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([[3.0]])
    assert parallel_linear(x, w_EOI, it.plan).tolist() == [[300], [30]]
    assert parallel_linear(x, w_EOI, it.plan, grouped_out=True).tolist() == [[30], [300]]
    assert parallel_linear(x, w_EOI, it.plan, gates=torch.tensor([[1, 0.5]])).tolist() == [[315]]


@both_paths
def test_inputs_are_not_written_to() -> None:
    it = case(random_ids(6, 2, 3), inputs=8, outputs=8, experts=3, dtype=torch.float32)
    leaves = [it.x_TI, it.w_EOI, it.bias_EO, it.gates_TK]
    before = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    y_TO = parallel_linear(it.x_TI, it.w_EOI, it.plan, gates=it.gates_TK, bias_EO=it.bias_EO)
    dy_TO = torch.ones_like(y_TO)
    torch.autograd.grad(y_TO, leaves, dy_TO)
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))
    assert torch.equal(dy_TO, torch.ones_like(y_TO))


def test_wrong_arguments_are_named() -> None:
    it = case([[0, 1], [2, 0], [1, 2]], inputs=8, outputs=4, experts=3, dtype=torch.float32)
    x, w = it.x_TI, it.w_EOI
    pairs = it.stored("pair")
    for words, call in {
        r"x \(token rows\) must be .*\(3, 8\)": lambda: parallel_linear(x[:2], w, it.plan),
        r"x \(pair rows\) must be .*\(6, 8\)": lambda: parallel_linear(x, w, it.plan, fan_out=1),
        r"x \(grouped rows\) must be .*\(6, 8\)": lambda: parallel_linear(x, w, it.plan, grouped_in=True),
        r"x .* must be torch.float16": lambda: parallel_linear(x, w.half(), it.plan),
        "x must be a matrix": lambda: parallel_linear(x.int(), w, it.plan),
        r"x must be contiguous.*\(3, 8\) and strides \(1, 3\)": lambda: parallel_linear(transposed(x), w, it.plan),
        r"w \[E, O, I\] must be contiguous.*\(3, 4, 8\) and strides": lambda: parallel_linear(
            x, transposed(w), it.plan
        ),
        r"w \[E, O, I\] must be of the plan's 3": lambda: parallel_linear(x, w[:2], it.plan),
        r"gates \[T, K\]": lambda: parallel_linear(x, w, it.plan, gates=it.gates_TK.half()),
        r"gates \[T, K\] must": lambda: parallel_linear(x, w, it.plan, gates=it.gates_TK[:, :1]),
        "grouped_out must be false": lambda: parallel_linear(x, w, it.plan, gates=it.gates_TK, grouped_out=True),
        r"bias \[E, O\]": lambda: parallel_linear(x, w, it.plan, bias_EO=it.bias_EO[:, :2]),
        "fan_out must be 1 or the plan's 2": lambda: parallel_linear(x, w, it.plan, fan_out=3),
        "grouped rows have fan_out 1": lambda: parallel_linear(pairs, w, it.plan, grouped_in=True, fan_out=2),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()
