"""Peers from vLLM 0.25.1 for experts in MXFP4 with gpt-oss's clamped SwiGLU: OpenAI's Triton kernels, and Marlin.

Both get the codes and scales of ours.
Legend: E experts, O output rows, I input columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.case import Case
from bench.providers.base import module, require
from bench.timing import Call
from moe_kernels.activations.op import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT

_MOE: Final = "vllm.model_executor.layers.fused_moe"
_UTILS: Final = "vllm.model_executor.layers.quantization.utils"
ONE: Final = 127
"""The scale 1 in E8M0."""
_HIDDEN: Final = 256
_WIDTH: Final = 128
"""Marlin's sizes are multiples of these; vLLM fills up what is smaller."""


def prepare_mxfp4(case: Case) -> Call:
    """OpenAI's Triton kernels, vLLM's first choice for gpt-oss on an H200: gate and up rows alternate."""
    _require_gpt_oss(case)
    experts = module(f"{_MOE}.experts.gpt_oss_triton_kernels_moe")
    config, swizzle = module(f"{_MOE}.config"), module(f"{_UTILS}.mxfp4_utils")._swizzle_mxfp4
    matmul = module("triton_kernels.matmul_ogs")
    layers = []
    for w_in, w_down in _weights(case):
        first = swizzle(_alternate(nibble_pairs(w_in)), _alternate(w_in.scales))
        second = swizzle(nibble_pairs(w_down), w_down.scales.contiguous())
        scales = config.mxfp4_w4a16_moe_quant_config(
            w1_scale=_precise(matmul, first), w2_scale=_precise(matmul, second)
        )
        layers.append((first[0], second[0], scales))
    x_TD, draw, shape = case.x_TD, case.draw, case.shape

    def call(number: int) -> object:
        w_in, w_down, scales = layers[number % len(layers)]
        order = experts.make_routing_data(draw.ids_TK, draw.weights_TK, shape.E)
        return experts.triton_kernel_fused_experts(
            torch.empty_like(x_TD), x_TD, w_in, w_down, *order, topk=shape.k, quant_config=scales,
            swiglu_alpha=SWIGLU_OAI_ALPHA, swiglu_limit=SWIGLU_OAI_LIMIT,
        )  # fmt: skip

    return call


def prepare_marlin_mxfp4(case: Case) -> Call:
    """Marlin, with the hidden size and the expert width filled up as vLLM does it; rows are filled up beforehand."""
    _require_gpt_oss(case)
    marlin, ops = module(f"{_MOE}.experts.marlin_moe").fused_marlin_moe, module("vllm._custom_ops")
    prepare = module(f"{_UTILS}.marlin_utils_fp4").prepare_moe_mxfp4_layer_for_marlin
    workspace = module(f"{_UTILS}.marlin_utils").marlin_make_workspace_new(case.x_TD.device, 4)
    activation = module(f"{_MOE}.activation").MoEActivation.SWIGLUOAI_UNINTERLEAVE
    kind = module("vllm.scalar_type").scalar_types.float4_e2m1f
    x_TD = pad(case.x_TD, (0, -case.shape.d % _HIDDEN)).contiguous()
    dtype = SimpleNamespace(params_dtype=x_TD.dtype)
    layers = [prepare(dtype, *padded_layer(*pair), None, None)[:4] for pair in _weights(case)]
    draw, width = case.draw, case.shape.d

    def call(number: int) -> object:
        w_in, w_down, s_in, s_down = layers[number % len(layers)]
        y_TD = torch.empty_like(x_TD)
        marlin(
            x_TD, w_in, w_down, None, None, s_in, s_down, draw.weights_TK, draw.ids_TK, quant_type_id=kind.id,
            workspace=workspace, moe_sum=ops.moe_sum, output=y_TD, activation=activation,
            clamp_limit=SWIGLU_OAI_LIMIT, gemm1_alpha=SWIGLU_OAI_ALPHA, gemm1_beta=1.0,
        )  # fmt: skip
        return y_TD[:, :width]

    return call


def padded_layer(w_in: Any, w_down: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of both quantised matrices and their scales, zeros (times 1) up to Marlin's multiples, gate and up each."""
    hidden, width = -w_in.in_features % _HIDDEN, -w_down.in_features % _WIDTH
    codes_in, codes_down = nibble_pairs(w_in), nibble_pairs(w_down)
    gate_up = torch.cat([pad(half, (0, hidden // 2, 0, width)) for half in codes_in.chunk(2, 1)], 1)
    scales = [pad(half, (0, hidden // 32, 0, width), value=ONE) for half in w_in.scales.chunk(2, 1)]
    down = pad(codes_down, (0, width // 2, 0, hidden))
    return gate_up, down, torch.cat(scales, 1), pad(w_down.scales, (0, width // 32, 0, hidden), value=ONE)


def nibble_pairs(weight: Any) -> Tensor:
    """``[E, O, I / 2]`` as checkpoints store MXFP4: byte i holds column 2i in its low half and 2i + 1 in its high."""
    runs = weight.packed.view(*weight.packed.shape[:2], -1, 64)
    codes = torch.cat([runs & 0xF, runs >> 4], dim=3).flatten(2)[..., : weight.in_features]
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _alternate(gate_up_EOI: Tensor) -> Tensor:
    """Row 2j is row j of the gate, row 2j + 1 row j of up."""
    return torch.stack(gate_up_EOI.chunk(2, dim=1), dim=2).flatten(1, 2).contiguous()


def _precise(matmul: Any, swizzled: Any) -> Any:
    _, flex, scale = swizzled
    return matmul.PrecisionConfig(weight_scale=scale, flex_ctx=matmul.FlexCtx(rhs_data=flex))


def _weights(case: Case) -> Sequence[tuple[Any, Any]]:
    return case.bank.weights("mxfp4", case.copies)


def _require_gpt_oss(case: Case) -> None:
    require(case.device != "cpu", "vLLM's kernels need a GPU")
    require(case.op == "fused_moe" and case.dtype == "mxfp4", "measured with MXFP4 experts")
    require(case.shape.activation == "swiglu_oai", "these kernels are gpt-oss's")
