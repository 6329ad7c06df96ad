"""Peers that come with torch and transformers: a chain around ``grouped_mm``, and transformers' experts modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case
from bench.providers.base import Unsupported, require
from bench.providers.ours import grouped_rows
from bench.timing import Call
from moe_kernels.activations.op import activate


def prepare_grouped_mm(case: Case) -> Call:
    """Sort, gather, two ``grouped_mm``, un-sort, weigh and sum: what a careful user of torch writes."""
    builders: dict[str, Callable[[Case], Call]] = {
        "fused_moe": _layer,
        "grouped_mlp": _mlp,
        "parallel_linear": _linear,
        "route": _route,
        "plan": _plan,
        "route_plan": _route_plan,
    }
    if case.op not in ("route", "plan", "route_plan"):
        require(case.dtype in ("bf16", "fp16", "fp32"), f"grouped_mm takes no {case.dtype} weights")
    return builders[case.op](case)


def sort_pairs(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """``order_S`` of the pairs by expert, and where each expert's run ends (int32)."""
    sorted_S, order_S = ids_TK.flatten().sort(stable=True)
    ids_E = torch.arange(experts, device=ids_TK.device, dtype=sorted_S.dtype)
    return order_S, torch.searchsorted(sorted_S, ids_E, right=True, out_int32=True)


def _layer(case: Case) -> Call:
    weights, draw, slots = case.bank.floats(case.copies), case.draw, case.shape.k

    def call(number: int) -> Tensor:
        w_in, w_down = weights[number % len(weights)]
        order_S, ends_E = sort_pairs(draw.ids_TK, case.shape.E)
        out_SD = _experts(case, case.x_TD[order_S // slots], w_in, w_down, ends_E)
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        out_TKD = out_SD[place_S].view(case.rows, slots, -1)
        return (out_TKD * draw.weights_TK.unsqueeze(2).to(out_TKD.dtype)).sum(dim=1)

    return call


def _experts(case: Case, x_SD: Tensor, w_in: Tensor, w_down: Tensor, ends_E: Tensor) -> Tensor:
    hidden = activate(F.grouped_mm(x_SD, w_in.transpose(1, 2), offs=ends_E), case.activation)
    return F.grouped_mm(hidden, w_down.transpose(1, 2), offs=ends_E)


def _mlp(case: Case) -> Call:
    weights = case.bank.floats(case.copies)
    x_SD, counts_E = grouped_rows(case)

    def call(number: int) -> Tensor:
        w_in, w_down = weights[number % len(weights)]
        return _experts(case, x_SD, w_in, w_down, counts_E.cumsum(0, dtype=torch.int32))

    return call


def _linear(case: Case) -> Call:
    weights = case.bank.floats(case.copies)
    order_S, ends_E = sort_pairs(case.draw.ids_TK, case.shape.E)

    def call(number: int) -> Tensor:
        w_in = weights[number % len(weights)][0]
        return F.grouped_mm(case.x_TD[order_S // case.shape.k], w_in.transpose(1, 2), offs=ends_E)

    return call


def _route(case: Case) -> Call:
    def call(_: int) -> tuple[Tensor, Tensor]:
        chosen = torch.topk(torch.softmax(case.logits_TE, dim=-1), case.shape.k)
        return chosen.values / chosen.values.sum(dim=-1, keepdim=True), chosen.indices

    return call


def _plan(case: Case) -> Call:
    return lambda _: sort_pairs(case.draw.ids_TK, case.shape.E)


def _route_plan(case: Case) -> Call:
    route = _route(case)

    def call(_: int) -> object:
        routed = route(0)
        assert isinstance(routed, tuple)
        return routed[0], sort_pairs(routed[1], case.shape.E)

    return call


def prepare_transformers(case: Case) -> Call:
    """transformers' Qwen3-MoE experts with its ``grouped_mm`` backend."""
    require(case.op == "fused_moe" and case.shape.activation == "swiglu", "only gated expert layers")
    require(case.dtype in ("bf16", "fp16", "fp32"), f"no {case.dtype} weights")
    try:
        modeling: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        configuration: Any = importlib.import_module("transformers.models.qwen3_moe.configuration_qwen3_moe")
    except ImportError as error:
        raise Unsupported(str(error)) from error
    shape = case.shape
    config = configuration.Qwen3MoeConfig(
        hidden_size=shape.d, moe_intermediate_size=shape.f, num_experts=shape.E, num_experts_per_tok=shape.k
    )
    config._experts_implementation = "grouped_mm"
    modules = []
    for w_in, w_down in case.bank.floats(case.copies):
        with torch.device("meta"):
            module = modeling.Qwen3MoeExperts(config)
        module.gate_up_proj = torch.nn.Parameter(w_in, requires_grad=False)
        module.down_proj = torch.nn.Parameter(w_down, requires_grad=False)
        modules.append(module)
    ids_TK, weights_TK = case.draw.ids_TK.long(), case.draw.weights_TK.to(case.x_TD.dtype)

    def call(number: int) -> object:
        with torch.no_grad():
            return modules[number % len(modules)](case.x_TD, ids_TK, weights_TK)

    return call
