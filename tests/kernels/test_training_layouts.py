"""What has a backward pass, on tensors that lie unusually in memory: as on contiguous ones, or refused as REFUSED says.

Everything is compared with the same call on contiguous copies; that those are right is shown elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from testkit.models.layouts import EXPANDED, rows_of_a_wider_one, transposed
from testkit.models.pair_layouts import case, random_ids
from testkit.models.pairwise import pairwise
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, MixtureOfAttention, SparseMLP, combine, parallel_linear, plan, sparse_mlp
from moe_kernels.grouped_gemm.op import grouped_gemm
from moe_kernels.training.activation_gradients.op import activation_backward
from moe_kernels.training.grouped_outer.op import grouped_sum
from moe_kernels.training.pair_rows.op import group_rows, pair_dots

pytestmark = pytest.mark.usefixtures("path")
Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Tensor]
IDS_TK = random_ids(7, 2, 3, absent=0.2)
ORDER = plan(IDS_TK, 3, block_rows=16)
IT = case(IDS_TK, inputs=8, outputs=6, experts=3, dtype=torch.float32)
ODD = [transposed, rows_of_a_wider_one, *EXPANDED]
PATHS = ["torch", "triton"]
REFUSED = {"parallel_linear": {"x", "w"}, "sparse_mlp": {"x", "w_in", "w_out"}}
"""Tensors that are refused in each of these layouts, by op. Everything else works in each layout."""
grids: dict[str, list[tuple[Any, ...]]] = {}


def grid(op: str, words: str, *axes: list[Any], also: tuple[Any, ...] = ()) -> pytest.MarkDecorator:
    """Parametrise by layouts, paths and ``axes``, so that every two of them meet; ``also`` is one row more."""
    rows = pairwise(ODD, PATHS, *axes) + ([also] if also else [])
    grids.setdefault(op, []).extend(rows)
    return pytest.mark.parametrize(f"layout, path, {words}", rows)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def outcome(run: Run, given: Tensors) -> list[Tensor]:
    """The result, and the gradients of all floating tensors but "dy"."""
    leaves = {name: tensor.detach() for name, tensor in given.items()}
    wanted = [t.requires_grad_() for name, t in leaves.items() if name != "dy" and t.is_floating_point()]
    y = run(leaves)
    if "dy" not in leaves:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, wanted, leaves["dy"])]


def assert_as_contiguous(run: Run, given: Tensors, name: str, layout: Callable[[Tensor], Tensor], op: str = "") -> None:
    odd = layout(given[name])
    want = outcome(run, {**given, name: odd.clone(memory_format=torch.contiguous_format)})
    if name in REFUSED.get(op, ()):
        with pytest.raises(ArgumentError, match=f"{name} .*must be contiguous"):
            outcome(run, {**given, name: odd})
        return
    actual = outcome(run, {**given, name: odd})
    for one, other in zip(actual, want, strict=True):
        assert_close(one, other)


@grid("parallel_linear", "name, rows", ["x", "w", "gates", "bias", "dy"], ["token", "pair", "grouped"])
def test_parallel_linear(rows: str, name: str, layout: Any) -> None:
    given = {"x": IT.stored(rows), "w": IT.w_EOI, "bias": IT.bias_EO, "gates": IT.gates_TK, "dy": normal(7, 6)}

    def run(t: Tensors) -> Tensor:
        fan_out, grouped = 1 if rows == "pair" else None, rows == "grouped"
        return parallel_linear(
            t["x"], t["w"], ORDER, gates=t["gates"], grouped_in=grouped, bias_EO=t["bias"], fan_out=fan_out
        )

    assert_as_contiguous(run, given, name, layout, "parallel_linear")


@grid("parallel_linear", "name, grouped_out", ["x", "w", "bias", "dy"], [False, True])
def test_parallel_linear_without_gates(grouped_out: bool, name: str, layout: Any) -> None:
    given = {"x": IT.x_TI, "w": IT.w_EOI, "bias": IT.bias_EO, "dy": normal(14, 6)}

    def run(t: Tensors) -> Tensor:
        return parallel_linear(t["x"], t["w"], ORDER, bias_EO=t["bias"], grouped_out=grouped_out)

    assert_as_contiguous(run, given, name, layout, "parallel_linear")


@grid("sparse_mlp", "name", ["x", "w_in", "w_out", "gates", "bias_in", "bias_out", "dy"])
def test_sparse_mlp(name: str, layout: Any) -> None:
    given = {
        "x": normal(7, 8), "w_in": normal(3, 12, 8), "w_out": normal(3, 8, 6), "gates": normal(7, 2),
        "bias_in": normal(3, 12), "bias_out": normal(3, 8), "dy": normal(7, 8),
    }  # fmt: skip

    def run(t: Tensors) -> Tensor:
        biases = {"bias_in": t["bias_in"], "bias_out": t["bias_out"]}
        return sparse_mlp(t["x"], t["w_in"], t["w_out"], ORDER, t["gates"], activation="swiglu", **biases)

    assert_as_contiguous(run, given, name, layout, "sparse_mlp")
    del given["dy"]
    if name in given:
        with torch.no_grad():
            assert_as_contiguous(run, given, name, layout, "sparse_mlp")


@grid("SparseMLP", "name", ["x", "logits", "ids", "gates", "dy", "bias_in", "bias_out"])
def test_module(name: str, layout: Any) -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 6, experts=3, top_k=2, activation="swiglu", bias=True)
    given = {"x": normal(7, 8), "dy": normal(7, 8), "bias_in": normal(3, 12), "bias_out": normal(3, 8)}
    given |= {"logits": normal(7, 3)} if name == "logits" else {"ids": IDS_TK, "gates": normal(7, 2)}

    def run(t: Tensors) -> Tensor:
        choice = {"ids_TK": t["ids"], "gates_TK": t["gates"]} if "ids" in t else {"logits_TE": t["logits"]}
        biases = {"bias_in": t["bias_in"], "bias_out": t["bias_out"]}
        return torch.func.functional_call(module, biases, (t["x"],), choice)

    assert_as_contiguous(run, given, name, layout)


@grid("MixtureOfAttention", "name", ["x", "gates", "positions"], also=(transposed, "triton", "positions"))
def test_attention(name: str, layout: Any) -> None:
    torch.manual_seed(0)
    module = MixtureOfAttention(8, 4, heads=2, experts=3, top_k=2)
    given = {"x": normal(2, 3, 8), "ids": IDS_TK[:6], "gates": normal(6, 2), "dy": normal(2, 3, 8)}
    given["positions"] = torch.tensor([[5, 0, 3], [1, 2, 9]])

    def run(t: Tensors) -> Tensor:
        return module(t["x"], ids_TK=t["ids"], gates_TK=t["gates"], positions_BL=t["positions"])

    assert_as_contiguous(run, given, name, layout)


@grid("combine", "name", ["out", "place", "weights"])
def test_combine(name: str, layout: Any) -> None:
    given = {"out": normal(14, 6), "place": ORDER.place_S.view(7, 2), "weights": normal(7, 2)}
    with torch.no_grad():
        assert_as_contiguous(lambda t: combine(t["out"], t["place"], t["weights"]), given, name, layout)


ROWS = normal(7, 6)
PAIR_OPS: dict[str, tuple[Run, Tensors]] = {
    "group_rows": (
        lambda t: group_rows(t["rows"], t["gates"], ORDER, layout="token"),
        {"rows": normal(7, 6), "gates": normal(7, 2)},
    ),
    "pair_dots": (
        lambda t: pair_dots(t["a"], t["b"], ORDER, a_rows="token", b_rows="expert"),
        {"a": normal(7, 6), "b": normal(3, 6)},
    ),
    "grouped_sum": (
        lambda t: grouped_sum(ROWS, ORDER, rows="token", gates_TK=t["gates"]),
        {"gates": normal(7, 2)},
    ),
    "grouped_gemm": (
        lambda t: grouped_gemm(t["x"], IT.w_EOI, ORDER, gather="token", bias_EO=t["bias"], row_scale_S=t["scale"]),
        {"x": normal(7, 8), "bias": normal(3, 6), "scale": normal(14)},
    ),
    "activation_backward": (
        lambda t: activation_backward(normal(14, 6), normal(14, 12), t["gates"], ORDER, "swiglu")[2],
        {"gates": normal(7, 2)},
    ),
}


PARTS = [(op, name) for op, (_, given) in PAIR_OPS.items() for name in given]


@grid("parts", "op_and_name", PARTS, also=(transposed, "triton", ("grouped_gemm", "x")))
def test_what_they_are_made_of(op_and_name: tuple[str, str], layout: Any) -> None:
    op, name = op_and_name
    run, given = PAIR_OPS[op]
    with torch.no_grad():
        assert_as_contiguous(run, given, name, layout)


@pytest.mark.parametrize("path", ["torch"])
def test_the_grids_hold_so_many_refusals() -> None:
    refused = {op: sum(name in REFUSED[op] for _, _, name, *_ in grids[op]) for op in REFUSED}
    assert (sum(map(len, grids.values())), refused) == (154, {"parallel_linear": 16, "sparse_mlp": 12})
