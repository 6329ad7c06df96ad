"""DeepSpeed Inference's gating: tables of tokens per expert against sparse einsums over one-hot masks.

Section 5.4 replaces S x E x M x c work by S x M x c. Both sides: top-1 of 128 experts, capacity, dispatch of the tokens
into expert order, identity experts, and the weighted way back.
Legend: T tokens, E experts, C capacity, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import floors
from bench.bank import DTYPES
from bench.measuring import Settings
from bench.results import Row
from bench.shapes import LayerShape, find
from bench.suites.modules import timed
from bench.timing import Call
from moe_kernels.combine.op import combine
from moe_kernels.plan.op import plan
from moe_kernels.router.op import route

ROWS: Final = (128, 512, 2048, 8192)
CAPACITY_FACTOR: Final = 1.25


def gating(settings: Settings) -> Iterator[Row]:
    """The floor moves every token four times: read and written on the way in and on the way out."""
    shape = find("ds-1.3b-moe128").scaled(settings.scale)
    dtype = "bf16" if settings.on_gpu else "fp32"
    for count in [settings.tokens] if settings.tokens else ROWS:
        torch.manual_seed(settings.seed)
        x_TD = torch.randn(count, shape.d, dtype=DTYPES[dtype], device=settings.device)
        logits_TE = torch.randn(count, shape.E, device=settings.device)
        for provider, function in (("ours", by_table), ("torch", by_einsum)):
            row = Row(
                suite=settings.suite, op="gating", provider=provider, shape=shape.name, rows=count, dtype=dtype,
                floor_us=floors.memory_us(4.0 * x_TD.nbytes),
            )  # fmt: skip

            def build(function: object = function, x: Tensor = x_TD, logits: Tensor = logits_TE) -> Call:
                return lambda _: function(x, logits, shape)  # type: ignore[operator]

            yield timed(build, row, settings, graph=True)


def capacity(rows: int, shape: LayerShape) -> int:
    """Example: 512 tokens, 128 experts: ceil(1.25 x 4) = 5."""
    return math.ceil(CAPACITY_FACTOR * rows / shape.E)


def by_table(x_TD: Tensor, logits_TE: Tensor, shape: LayerShape) -> Tensor:
    """Ours. The gather is explicit here; inside ``fused_moe`` the product's loads do it."""
    ids_T1, weights_T1 = route(logits_TE, top_k=1)
    order = plan(ids_T1, shape.E, capacity=capacity(len(x_TD), shape))
    grouped_SD = x_TD[order.order_S]
    return combine(grouped_SD, order.place_S.view(-1, 1), weights_T1)


def by_einsum(x_TD: Tensor, logits_TE: Tensor, shape: LayerShape) -> Tensor:
    """One-hot masks ``[T, E, C]`` and two einsums, as GShard's paper writes it."""
    limit = capacity(len(x_TD), shape)
    weight_T, id_T = torch.softmax(logits_TE, dim=-1).max(dim=-1)
    chosen_TE = F.one_hot(id_T, shape.E)
    place_TE = (chosen_TE.cumsum(0) - 1) * chosen_TE
    kept_TE = chosen_TE * (place_TE < limit)
    slot_TEC = F.one_hot(place_TE.clamp(max=limit - 1), limit) * kept_TE.unsqueeze(2)
    dispatched_ECD = torch.einsum("tec,td->ecd", slot_TEC.to(x_TD.dtype), x_TD)
    combine_TEC = slot_TEC * weight_T.view(-1, 1, 1)
    return torch.einsum("tec,ecd->td", combine_TEC.to(x_TD.dtype), dispatched_ECD)
