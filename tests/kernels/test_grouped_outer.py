"""Weight and bias gradients per expert against a loop over rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from testkit.models.pair_layouts import LAYOUTS, Case, case, random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels.training.grouped_outer.op import Rows, grouped_outer, grouped_sum

both_paths = pytest.mark.usefixtures("path")
TILES = {"block_o": 16, "block_i": 32, "block_m": 16, "num_warps": 4, "num_stages": 2, "group": 2}


def operands(it: Case, dy_rows: str, x_rows: str) -> tuple[Tensor, Tensor]:
    """``x`` in one layout and rows of ``O`` columns in another."""
    outputs = it.w_EOI.shape[1]
    dy_TO = torch.randn(it.x_TI.shape[0], outputs, generator=torch.Generator().manual_seed(7)).to(it.x_TI.dtype)
    held = case(it.ids_TK, inputs=outputs, outputs=1, experts=len(it.w_EOI), dtype=it.x_TI.dtype)
    held.x_TI.copy_(dy_TO)
    return held.stored(dy_rows), it.stored(x_rows)


def source(it: Case, pair: int, rows: str) -> int:
    return {"token": pair // it.plan.slots, "pair": pair, "grouped": int(it.plan.place_S[pair])}[rows]


def outer_by_pair(it: Case, dy: Tensor, x: Tensor, dy_rows: str, x_rows: str) -> Tensor:
    dw_EOI = torch.zeros(len(it.w_EOI), dy.shape[1], x.shape[1], dtype=torch.float64)
    for pair, expert in enumerate(it.ids_TK.flatten().tolist()):
        if it.plan.place_S[pair] >= 0:
            row_O, row_I = dy[source(it, pair, dy_rows)], x[source(it, pair, x_rows)]
            dw_EOI[expert] += torch.outer(row_O.double(), row_I.double())
    return dw_EOI


def outer(it: Case, dy_rows: Rows, x_rows: Rows, tiles: Mapping[str, int] = TILES) -> tuple[Tensor, Tensor]:
    dy, x = operands(it, dy_rows, x_rows)
    actual = grouped_outer(dy, x, it.plan, dy_rows=dy_rows, x_rows=x_rows, tiles=tiles)
    return actual, outer_by_pair(it, dy, x, dy_rows, x_rows)


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_rows", LAYOUTS)
@pytest.mark.parametrize("dy_rows", LAYOUTS)
def test_equals_the_loop(dy_rows: Rows, x_rows: Rows, dtype: torch.dtype) -> None:
    it = case(random_ids(31, 2, 4, absent=0.1), inputs=40, outputs=24, experts=4, dtype=dtype)
    assert_close(*outer(it, dy_rows, x_rows))


@both_paths
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (17, 33), (32, 16), (64, 48), (96, 80)])
def test_widths(inputs: int, outputs: int) -> None:
    it = case(random_ids(12, 2, 3), inputs=inputs, outputs=outputs, experts=3, dtype=torch.float32)
    assert_close(*outer(it, "token", "grouped"))
    assert_close(*outer(it, "grouped", "token"))


@both_paths
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 47])
def test_counts_of_rows(rows: int) -> None:
    """Blocks of 16 rows: none whole, one whole, one and a part, and so on; expert 1 has none."""
    it = case([[0]] * rows + [[2]] * (rows + 1), inputs=8, outputs=16, experts=3, dtype=torch.float32)
    assert_close(*outer(it, "grouped", "token"))


@both_paths
def test_tiles_of_the_table() -> None:
    it = case(random_ids(70, 2, 2), inputs=16, outputs=16, experts=2, dtype=torch.float16)
    dy, x = operands(it, "grouped", "token")
    actual = grouped_outer(dy, x, it.plan, dy_rows="grouped", x_rows="token")
    assert_close(actual, outer_by_pair(it, dy, x, "grouped", "token"))


@both_paths
def test_experts_without_rows_get_zeros() -> None:
    it = case([[1]] * 5, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    dy, x = operands(it, "token", "token")
    dw = grouped_outer(dy, x, it.plan, dy_rows="token", x_rows="token", tiles=TILES)
    db = grouped_sum(dy, it.plan, rows="token")
    for gradient in (dw, db):
        assert (gradient[[0, 2, 3]] == 0).all()
        assert (gradient[1] != 0).all()


@both_paths
@pytest.mark.parametrize("rows", LAYOUTS)
def test_nan_does_not_reach_the_next_expert(rows: Rows) -> None:
    """Blocks of 16 rows that hold the end of one expert and the start of the next."""
    it = case([[0]] * 5 + [[1]] * 6 + [[2]] * 21, inputs=8, outputs=8, experts=3, dtype=torch.float32)
    for bad in (0, 1):
        dy_x = operands(it, rows, rows)
        dy_x[bad][5:11] = torch.nan
        dw = grouped_outer(*dy_x, it.plan, dy_rows=rows, x_rows=rows, tiles=TILES)
        assert dw[[0, 2]].isfinite().all()
        assert dw[1].isnan().all()
        assert grouped_sum(dy_x[bad], it.plan, rows=rows)[[0, 2]].isfinite().all()


@both_paths
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rows", LAYOUTS)
def test_sum_equals_the_loop(rows: Rows, weighted: bool) -> None:
    it = case(random_ids(50, 3, 4, absent=0.1), inputs=9, outputs=4, experts=4, dtype=torch.float32)
    x = it.stored(rows)
    want = torch.zeros(4, 9, dtype=torch.float64)
    for pair, expert in enumerate(it.ids_TK.flatten().tolist()):
        if it.plan.place_S[pair] >= 0:
            gate = it.gates_TK.flatten()[pair].double() if weighted else 1
            want[expert] += gate * x[source(it, pair, rows)].double()
    assert_close(grouped_sum(x, it.plan, rows=rows, gates_TK=it.gates_TK if weighted else None), want)


@both_paths
def test_examples_of_the_docstrings() -> None:
    it = case([[0], [0], [1]], inputs=1, outputs=1, experts=2, dtype=torch.float32)
    dy, x = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[10.0], [1.0], [7.0]])
    assert grouped_outer(dy, x, it.plan, dy_rows="grouped", x_rows="grouped").tolist() == [[[12]], [[35]]]
    assert grouped_sum(dy, it.plan, rows="grouped").tolist() == [[3], [5]]
