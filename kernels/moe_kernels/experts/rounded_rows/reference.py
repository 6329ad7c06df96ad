"""Layers of :mod:`moe_kernels.experts.rounded_rows.kernel` in plain torch: rows rounded alike, sums in float32.

Legend: N rows, I input columns, G groups of 128 columns; T, K, S, D, E, F as in :mod:`moe_kernels.experts.op`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.activations.op import Activation, activate
from moe_kernels.experts.reference import bias_of_rows, combine_pairs, planned_pairs
from moe_kernels.grouped_gemm.op import grouped_product
from moe_kernels.plan.types import Plan
from moe_kernels.quant.op import dequantize_experts
from moe_kernels.quant.weight import QuantisedWeight

GROUP: Final = 128
_INFINITY: Final = 0x7F800000
_NAN: Final = 0x7FC00000


def fused_moe(
    x_TD: Tensor,
    w_in: QuantisedWeight,
    w_down: QuantisedWeight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
    weights_on: str,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    """:func:`moe_kernels.fused_moe` with rounded rows. All weights are made numbers at once: for tests."""
    slots, experts = ids_TK.shape[1], w_down.shape[0]
    order_N, ends_E = planned_pairs(ids_TK, experts, keep_T, local_E, plan)
    weigh_input = weights_on == "input"
    scale_N1 = weights_TK.flatten()[order_N].unsqueeze(1) if weigh_input else None
    h_NF = activate(_linear(x_TD[order_N // slots], w_in, bias_in, ends_E, scale_N1), activation).to(x_TD.dtype)
    out_ND = _linear(h_NF, w_down, bias_down, ends_E, None).to(x_TD.dtype)
    return combine_pairs(out_ND, order_N, torch.ones_like(weights_TK) if weigh_input else weights_TK).to(x_TD.dtype)


def _linear(
    x_NI: Tensor, weight: QuantisedWeight, bias_EO: Tensor | None, ends_E: Tensor, scale_N1: Tensor | None
) -> Tensor:
    out_NO = grouped_product(rounded(x_NI), dequantize_experts(weight), ends_E)
    out_NO = out_NO if scale_N1 is None else out_NO * scale_N1
    return out_NO if bias_EO is None else out_NO + bias_of_rows(bias_EO, ends_E, len(x_NI)).float()


def rounded(x_NI: Tensor) -> Tensor:
    """What ``x_NI`` is to a product: float32 ``[N, I]``."""
    codes_NI, scales_GN = round_rows(x_NI)
    values_NGC = codes_NI.float().view(len(x_NI), -1, GROUP) * scales_GN.t().unsqueeze(2)
    return values_NGC.flatten(1)[:, : x_NI.shape[1]]


def round_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes ``[N, G x 128]`` and float32 scales ``[G, N]``, powers of two: as ``round_rows_kernel`` has them."""
    rows, columns = x_NI.shape
    x_NGC = F.pad(x_NI.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    largest_NG = (x_NGC.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(2)
    exponent_NG = (((largest_NG + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    inverse_NG = ((254 - exponent_NG) << 23).view(torch.float32)
    codes_NI = (x_NGC * inverse_NG.unsqueeze(2)).to(torch.float8_e4m3fn).view(rows, -1)
    scales_NG = torch.where(largest_NG < _INFINITY, exponent_NG << 23, _NAN).view(torch.float32)
    return codes_NI, scales_NG.t().contiguous()
