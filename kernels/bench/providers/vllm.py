"""Peers from vLLM 0.25.1: its Triton ``fused_experts``, its Marlin int4 and int8 layer, and its routing kernels."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from bench.bank import QUANTISED
from bench.case import Case
from bench.providers.base import module, require
from bench.timing import Call

_MOE: Final = "vllm.model_executor.layers.fused_moe"
MARLIN: Final = ("int8", "int8_channel", "int4", "int4_channel")
_BLOCK_ROWS: Final = 64
"""Rows per block for ``moe_align_block_size`` where it is measured alone."""


def prepare_vllm(case: Case) -> Call:
    require(case.device != "cpu", "vLLM's kernels need a GPU")
    if case.op == "fused_moe":
        return _fused_experts(case)
    require(case.op in ("route", "plan", "route_plan"), f"vLLM has no {case.op}")
    return _routing(case)


def _fused_experts(case: Case) -> Call:
    require(case.dtype in ("bf16", "fp16"), "measured with 16-bit weights; Marlin is its integer path")
    fused_moe = module(f"{_MOE}.fused_moe")
    activations = module(f"{_MOE}.activation").MoEActivation
    activation = activations.SILU if case.shape.gated else activations.GELU_NO_MUL
    weights, draw = case.bank.floats(case.copies), case.draw

    def call(number: int) -> object:
        w_in, w_down = weights[number % len(weights)]
        return fused_moe.fused_experts(case.x_TD, w_in, w_down, draw.weights_TK, draw.ids_TK, activation=activation)

    return call


def prepare_fp8(case: Case) -> Call:
    """Blocks of 128 x 128, rows rounded to FP8 with a scale for each 128 columns."""
    require(case.device != "cpu", "vLLM's kernels need a GPU")
    require(case.op == "fused_moe" and case.dtype == "fp8" and case.shape.gated, "measured with gated FP8 experts")
    fused_moe, config = module(f"{_MOE}.fused_moe"), module(f"{_MOE}.config")
    activation = module(f"{_MOE}.activation").MoEActivation.SILU
    layers = [_fp8_layer(config, *pair) for pair in case.bank.weights("fp8", case.copies)]
    draw = case.draw

    def call(number: int) -> object:
        w_in, w_down, scales = layers[number % len(layers)]
        return fused_moe.fused_experts(
            case.x_TD, w_in, w_down, draw.weights_TK, draw.ids_TK, activation=activation, quant_config=scales
        )

    return call


def _fp8_layer(config: Any, w_in: Any, w_down: Any) -> tuple[Tensor, Tensor, Any]:
    block, floats = [w_in.scale_rows, w_in.group], torch.float8_e4m3fn
    scales = config.fp8_w8a8_moe_quant_config(w1_scale=w_in.scales, w2_scale=w_down.scales, block_shape=block)
    return w_in.packed.view(floats), w_down.packed.view(floats), scales


def _routing(case: Case) -> Call:
    route = module(f"{_MOE}.router.fused_topk_router").fused_topk
    align = module(f"{_MOE}.moe_align_block_size").moe_align_block_size

    def run_route() -> Any:
        return route(case.x_TD, case.logits_TE, case.shape.k, True)

    def call(_: int) -> object:
        if case.op == "route":
            return run_route()
        ids_TK = case.draw.ids_TK if case.op == "plan" else run_route()[1]
        return align(ids_TK, _BLOCK_ROWS, case.shape.E)

    return call


def prepare_marlin(case: Case) -> Call:
    """The same integers and scales as ours, repacked the way vLLM repacks a GPTQ checkpoint."""
    require(case.device != "cpu", "Marlin needs a GPU")
    require(case.op == "fused_moe" and case.dtype in MARLIN, f"Marlin is measured with {MARLIN}")
    require(case.shape.gated, "measured with gated experts")
    fused_marlin_moe = module(f"{_MOE}.experts.marlin_moe").fused_marlin_moe
    ops = module("vllm._custom_ops")
    utils = module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    kinds = module("vllm.scalar_type").scalar_types
    kind = kinds.uint4b8 if QUANTISED[case.dtype]["bits"] == 4 else kinds.uint8b128
    first = tuple(_repack(weight, case.x_TD.dtype, ops, utils) for weight in case.bank.weights(case.dtype, 1)[0])
    layers = [first, *(tuple((q.clone(), s.clone()) for q, s in first) for _ in range(case.copies - 1))]
    workspace = utils.marlin_make_workspace_new(case.x_TD.device, 4)
    x_TD, draw = case.x_TD, case.draw

    def call(number: int) -> object:
        (w_in, s_in), (w_down, s_down) = layers[number % len(layers)]
        y_TD = torch.empty_like(x_TD)
        fused_marlin_moe(
            x_TD, w_in, w_down, None, None, s_in, s_down, draw.weights_TK, draw.ids_TK,
            quant_type_id=kind.id, workspace=workspace, moe_sum=ops.moe_sum, output=y_TD,
        )  # fmt: skip
        return y_TD

    return call


def _repack(weight: Any, dtype: torch.dtype, ops: Any, utils: Any) -> tuple[Tensor, Tensor]:
    """Marlin's weights and scales from ours."""
    bits, columns = weight.bits, weight.in_features
    experts, rows, _ = weight.packed.shape
    perm = torch.empty((experts, 0), dtype=torch.int32, device=weight.packed.device)
    packed = torch.stack([gptq_words(weight.packed[e], bits) for e in range(experts)])
    repacked = ops.gptq_marlin_moe_repack(packed, perm, columns, rows, bits)
    scales = weight.scales.to(dtype).transpose(1, 2).contiguous()
    group = weight.group or -1
    return repacked, utils.marlin_moe_permute_scales(scales, columns, rows, group)


def gptq_words(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[I / per word, O]`` as GPTQ stores it: word r holds input columns r x 8 (or 4) and on, lowest bits first.

    ``packed`` is ours, ``[O, I / 2]`` split-half nibbles or ``[O, I]`` bytes; both sides store the value plus 8 or 128.
    """
    values = _nibbles(packed) if bits == 4 else packed.view(torch.uint8)
    per_word = 32 // bits
    grouped = values.view(values.shape[0], -1, per_word).to(torch.int32)
    words = torch.zeros(grouped.shape[:2], dtype=torch.int32, device=packed.device)
    for at in range(per_word):
        words |= grouped[:, :, at] << (bits * at)
    return words.t().contiguous()


def _nibbles(packed: Tensor) -> Tensor:
    """``[O, I]`` from ``[O, I / 2]``: bytes 0..63 of a run hold columns 0..63 low and 64..127 high."""
    runs = packed.view(packed.shape[0], -1, 64)
    return torch.cat([runs & 0xF, runs >> 4], dim=2).flatten(1)
