"""The products of :mod:`moe_kernels.invariant.op` in plain torch: the same call, of the same shape, for any rows.

Legend: as there; P rows in blocks of ROWS, each of one expert, B blocks, N pairs that an expert here takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.activations.op import Activation, activate
from moe_kernels.experts.reference import combine_pairs, group_by_expert
from moe_kernels.plan.op import local_ids

ROWS: Final = 16
"""Of every product. Fewer cost more calls for prompts, more cost time for a single row."""
COLUMNS: Final = 8
"""A multiple of these is added up in one order wherever a row lies among the ROWS."""
VECTOR: Final = 64
"""A multiple of the elements that torch computes at a time: two registers of AVX-512, in bfloat16."""
SERIAL: Final = 32_768
"""Elements that torch does not divide among threads, which would cut vectors."""


def linear(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """:func:`moe_kernels.invariant.op.linear`, its arguments checked; at least one row."""
    rows, (x_TI, w_OI) = len(x_TI), (whole_columns(part) for part in (x_TI, w_OI))
    blocks = torch.split(F.pad(x_TI, (0, 0, 0, -rows % ROWS)), ROWS)
    if len(blocks) == 1:
        return F.linear(blocks[0], w_OI, bias_O)[:rows]
    return torch.cat([F.linear(block, w_OI, bias_O) for block in blocks])[:rows]


def experts(
    x_TD: Tensor,
    w_in_E2FD: Tensor,
    w_down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    local_E: Tensor | None,
    activation: Activation,
    bias_in_E2F: Tensor | None,
    bias_down_ED: Tensor | None,
) -> Tensor:
    """:func:`moe_kernels.invariant.op.experts`, its arguments checked; at least one pair."""
    count, slots = len(w_down_EDF), ids_TK.shape[1]
    order_N, ends_E = group_by_expert(local_ids(ids_TK, count, None, local_E).flatten(), count)
    place_N, expert_B = _blocks(ends_E)
    source_P = order_N.new_zeros(ROWS * len(expert_B)).index_copy_(0, place_N, order_N // slots)
    h_PF = activate(_products(x_TD[source_P], w_in_E2FD, bias_in_E2F, expert_B), activation, in_whole_vectors)
    out_PD = _products(h_PF, w_down_EDF, bias_down_ED, expert_B)
    return combine_pairs(out_PD[place_N], order_N, weights_TK).to(x_TD.dtype)


def whole_columns(x: Tensor) -> Tensor:
    """``x`` with zeros up to a multiple of :data:`COLUMNS` in its last dimension; itself where there is nothing to add,
    as with the models that there are. Of fewer MKL adds the last ones of some rows in another order."""
    return F.pad(x, (0, -x.shape[-1] % COLUMNS)) if x.shape[-1] % COLUMNS else x


def in_whole_vectors(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``op(x)`` of each element by the same instructions, wherever it lies.

    torch computes what fills no vector, at the end of a tensor or of a thread's share, one by one, and by other
    instructions: there exp and all that is made of it differ in low bits.
    """
    filler = -x.numel() % VECTOR
    flat = F.pad(x.flatten(), (0, filler)) if filler else x.flatten()
    out = torch.empty_like(flat)
    for part, result in zip(torch.split(flat, SERIAL), torch.split(out, SERIAL), strict=True):
        result.copy_(op(part))
    return out[: x.numel()].view(x.shape)


def _blocks(ends_E: Tensor) -> tuple[Tensor, list[int]]:
    """Where each grouped pair lies once every expert's run is filled up to whole blocks, and the blocks' experts.

    Example: blocks of 16, ends ``[1, 3]``: places ``[0, 16, 17]``, experts ``[0, 1]``.
    """
    count_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
    blocks_E = -(-count_E // ROWS)
    shift_E = (blocks_E.cumsum(0) - blocks_E) * ROWS - (ends_E - count_E)
    expert_N = torch.repeat_interleave(count_E)
    place_N = torch.arange(len(expert_N), device=ends_E.device) + shift_E[expert_N]
    return place_N, torch.repeat_interleave(blocks_E).tolist()


def _products(x_PI: Tensor, w_EOI: Tensor, bias_EO: Tensor | None, expert_B: list[int]) -> Tensor:
    out_PO, x_PI, w_EOI = x_PI.new_empty(len(x_PI), w_EOI.shape[1]), whole_columns(x_PI), whole_columns(w_EOI)
    for x_RI, out_RO, expert in zip(torch.split(x_PI, ROWS), torch.split(out_PO, ROWS), expert_B, strict=True):
        torch.mm(x_RI, w_EOI[expert].t(), out=out_RO)
        if bias_EO is not None:
            out_RO += bias_EO[expert]
    return out_PO
