"""Every op inside a CUDA graph: captured once, replayed on inputs that changed in place, equal to a plain call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import DTYPES
from bench.checks.base import Check, kernels, layer, random, require
from bench.checks.layers import act
from moe_kernels.experts.op import fused_moe, grouped_mlp
from moe_kernels.plan.op import plan
from moe_kernels.router.op import route
from moe_kernels.training.parallel_linear import parallel_linear
from moe_kernels.training.sparse_mlp import sparse_mlp

SHAPE: Final = "olmoe/4"
Run = Callable[[], list[Tensor]]


def graph_checks() -> list[Check]:
    cases = [("fused_moe", dtype, rows) for dtype in ("bf16", "int4") for rows in (1, 24, 400)]
    cases += [("grouped_mlp", "bf16", 400), ("route_plan", "bf16", 24), ("route_plan", "bf16", 4000)]
    cases += [("parallel_linear", "bf16", 400), ("sparse_mlp", "bf16", 400)]
    return [
        Check(name=f"graph {op} {dtype} rows {rows}", key=f"graph {op} {dtype}", run=partial(check, op, dtype, rows))
        for op, dtype, rows in cases
    ]


def check(op: str, dtype: str, rows: int, device: str) -> float:
    """On a CPU there is nothing to capture: only that the op runs."""
    inputs, run = _inputs(op, dtype, rows, device)
    with kernels(device), torch.no_grad():
        plain = run()
        if device == "cpu":
            return 0.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for tensor, fresh in inputs:
            tensor.copy_(fresh)
        graph.replay()
        expected = run()
    torch.cuda.synchronize()
    same = [torch.equal(found, wanted) for found, wanted in zip(captured, expected, strict=True)]
    require(all(same), f"replay differs from a plain call in outputs {[at for at, ok in enumerate(same) if not ok]}")
    changed = any(not torch.equal(before, after) for before, after in zip(plain, expected, strict=True))
    require(changed, "the new inputs changed nothing: the check shows nothing")
    return 0.0


def _inputs(op: str, dtype: str, rows: int, device: str) -> tuple[list[tuple[Tensor, Tensor]], Run]:
    """Tensors to change in place with their new values, and the call."""
    made = layer(SHAPE, dtype, "bf16", device)
    shape = made.shape
    old, new = (draws.uniform(rows, shape.E, shape.k, seed=seed, device=device) for seed in (0, 1))
    x, fresh = (random((rows, shape.d), DTYPES["bf16"], device, seed=seed) for seed in (5, 6))
    inputs = [(x, fresh), (old.ids_TK, new.ids_TK), (old.weights_TK, new.weights_TK)]
    if op == "route_plan":
        logits, other = (random((rows, shape.E), torch.float32, device, seed=seed) for seed in (7, 8))
        return [(logits, other)], lambda: _route_plan(logits, shape.k, shape.E)
    if op == "grouped_mlp":
        counts, more = (torch.full((shape.E,), n, dtype=torch.int32, device=device) for n in (2, 5))
        return [(x, fresh), (counts, more)], lambda: [
            grouped_mlp(x, counts, made.w_in, made.w_down, activation=act(made))
        ]
    runs: dict[str, Run] = {
        "fused_moe": lambda: [
            fused_moe(x, made.w_in, made.w_down, old.ids_TK, old.weights_TK, activation=act(made))
        ],
        "parallel_linear": lambda: [parallel_linear(x, _float(made.w_in), plan(old.ids_TK, shape.E))],
        "sparse_mlp": lambda: [
            sparse_mlp(
                x, _float(made.w_in), _float(made.w_down), plan(old.ids_TK, shape.E), old.weights_TK,
                activation=act(made),
            )
        ],
    }  # fmt: skip
    return inputs, runs[op]


def _route_plan(logits_TE: Tensor, slots: int, experts: int) -> list[Tensor]:
    ids_TK, weights_TK = route(logits_TE, top_k=slots, renormalise=True)
    order = plan(ids_TK, experts)
    return [ids_TK, weights_TK, order.order_S, order.ends_E, order.tile_expert_M, order.tile_count_1]


def _float(weight: object) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight
