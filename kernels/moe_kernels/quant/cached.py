"""One expert's product on a CPU: from a form that torch's own kernels take, made when the expert is first hit and kept.

Bfloat16 rows meet int4, and int8 per channel, in torch's weight-only products, which sum in float32 and do not round
the rows; scales are bfloat16 there. Everything else is multiplied by the expert's numbers in the rows' dtype: once all
experts were hit, these take the memory of a dense weight, beside the codes.
Legend: N rows, O and I features, G groups.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import torch
from torch import Tensor

from moe_kernels.quant.forms import Form
from moe_kernels.quant.packing import unpack, values
from moe_kernels.quant.weight import QuantisedWeight

SHARE: Final = 9 / 8
"""Of a weight's bytes, what forms of codes may take: all int4 ones fit, whose scales take twice the bytes."""
_INT4_GROUPS: Final = (256, 128, 64, 32)
"""Columns that may share a scale in torch's int4 product."""
_INT4_ROWS: Final = 16
"""Its matrices have a multiple of so many rows."""


def expert_product(q: QuantisedWeight, expert: int, x_NI: Tensor) -> Tensor:
    """``x_NI w[expert]^T`` in x's dtype. Of tensors of inference mode nothing is kept: no one counts writes to them."""
    parts, dtype = q.tensors().values(), x_NI.dtype
    if any(part.is_inference() for part in parts):
        return _form(q, expert, dtype).product(x_NI)
    most_bytes = SHARE * q.nbytes if _meets_codes(q, dtype) else math.prod(q.shape) * dtype.itemsize
    written = tuple(part._version for part in parts)
    key = (expert, dtype) if q.order is None else (expert, dtype, "order")
    return q.forms.get(key, written, most_bytes, partial(_form, q, expert, dtype)).product(x_NI)


def _meets_codes(q: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a product of rows in ``dtype`` with the codes."""
    if dtype != torch.bfloat16 or q.codes != "int" or q.scale_rows != 1 or q.order is not None:
        return False
    if q.bits == 8:
        return q.group == 0 and q.zeros is None
    return _int4_group(q) > 0 and q.shape[1] % _INT4_ROWS == 0


def _int4_group(q: QuantisedWeight) -> int:
    """The columns that share a scale in torch's product; 0 if it has none of that size."""
    return next((size for size in _INT4_GROUPS if (q.group or size) == size and q.in_features % size == 0), 0)


def _form(q: QuantisedWeight, expert: int, dtype: torch.dtype) -> Form:
    one = q.experts(expert, expert + 1)
    if not _meets_codes(q, dtype):
        w_OI = values(one)[0].to(dtype)
        return Form(partial(_dense_product, w_OI), w_OI.nbytes)
    if q.bits == 4:
        return _int4_form(one, _int4_group(q))
    codes_OI = (one.packed[0] ^ 128).view(torch.int8)
    scales_O = one.scales[0, :, 0].bfloat16()
    return Form(partial(_int8_product, codes_OI, scales_O), codes_OI.nbytes)


def _int4_form(one: QuantisedWeight, group: int) -> Form:
    """torch's product has (code - 8) x scale + offset."""
    codes_OI = unpack(one.packed[0], 4, one.in_features).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI, 2)
    scales_OG = one.scales[0].float()
    offsets_OG = torch.zeros_like(scales_OG) if one.zeros is None else scales_OG * (8 - one.zeros[0].float())
    both_GO2 = torch.stack([scales_OG, offsets_OG], dim=2).transpose(0, 1).bfloat16()
    both_GO2 = both_GO2.expand(one.in_features // group, -1, -1).contiguous()
    return Form(partial(_int4_product, packed, group, both_GO2), packed.nbytes + both_GO2.nbytes)


def _int4_product(packed: Tensor, group: int, scales_GO2: Tensor, x_NI: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, packed, group, scales_GO2)
    return result


def _int8_product(codes_OI: Tensor, scales_O: Tensor, x_NI: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._weight_int8pack_mm(x_NI, codes_OI, scales_O)
    return result


def _dense_product(w_OI: Tensor, x_NI: Tensor) -> Tensor:
    return x_NI @ w_OI.T
