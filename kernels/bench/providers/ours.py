"""moe_kernels itself: its kernels as ``ours``, its plain-torch references as ``torch``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.bank import DTYPES
from bench.case import Case
from bench.providers.base import require
from bench.timing import Call
from moe_kernels import backend, tiles
from moe_kernels.experts.op import fused_moe, grouped_mlp
from moe_kernels.plan.op import plan
from moe_kernels.router.op import route
from moe_kernels.training.parallel_linear import parallel_linear


def prepare_ours(case: Case) -> Call:
    builders: dict[str, Callable[[Case], Call]] = {
        "fused_moe": _fused_moe,
        "grouped_mlp": _grouped_mlp,
        "parallel_linear": _parallel_linear,
        "route": _route,
        "plan": _plan,
        "route_plan": _route_plan,
    }
    return builders[case.op](case)


def prepare_weight_only(case: Case) -> Call:
    """FP8 weights with rows as they are, where the tile table may have them rounded to FP8 as well."""
    require(case.op == "fused_moe" and case.dtype == "fp8", "rows are rounded for FP8 weights")
    require(case.device != "cpu", "on a CPU no rows are rounded")
    call = prepare_ours(case)

    def run(number: int) -> object:
        with tiles.overridden({"rounded_rows": {"FROM_ROWS": 0}}):
            return call(number)

    return run


def prepare_reference(case: Case) -> Call:
    call = prepare_ours(case)

    def run(number: int) -> object:
        with backend.forced("torch"):
            return call(number)

    return run


def grouped_rows(case: Case) -> tuple[Tensor, Tensor]:
    """``x_SD`` as an expert worker gets it, sorted by expert, and ``counts_E`` int32."""
    ids_S = case.draw.ids_TK.flatten().long()
    order_S = ids_S.argsort(stable=True)
    counts_E = torch.bincount(ids_S, minlength=case.shape.E).int()
    return case.x_TD[order_S // case.shape.k].contiguous(), counts_E


def _fused_moe(case: Case) -> Call:
    weights = case.bank.weights(case.dtype, case.copies)
    x_TD, draw, activation = case.x_TD, case.draw, case.activation

    def call(number: int) -> object:
        w_in, w_down = weights[number % len(weights)]
        return fused_moe(x_TD, w_in, w_down, draw.ids_TK, draw.weights_TK, activation=activation)

    return call


def _grouped_mlp(case: Case) -> Call:
    weights = case.bank.weights(case.dtype, case.copies)
    x_SD, counts_E = grouped_rows(case)

    def call(number: int) -> object:
        w_in, w_down = weights[number % len(weights)]
        return grouped_mlp(x_SD, counts_E, w_in, w_down, activation=case.activation)

    return call


def _parallel_linear(case: Case) -> Call:
    """Scattered tokens in, grouped rows out: the first half of ScatterMoE's MLP (its algorithm 3)."""
    require(case.dtype in DTYPES, "trained weights are floats")
    weights = case.bank.floats(case.copies)
    order = plan(case.draw.ids_TK, case.shape.E)

    def call(number: int) -> object:
        return parallel_linear(case.x_TD, weights[number % len(weights)][0], order, grouped_out=True)

    return call


def _route(case: Case) -> Call:
    return lambda _: route(case.logits_TE, top_k=case.shape.k, renormalise=True)


def _plan(case: Case) -> Call:
    return lambda _: plan(case.draw.ids_TK, case.shape.E)


def _route_plan(case: Case) -> Call:
    def call(_: int) -> object:
        ids_TK, weights_TK = route(case.logits_TE, top_k=case.shape.k, renormalise=True)
        return weights_TK, plan(ids_TK, case.shape.E)

    return call
