"""The products of :mod:`moe_kernels.invariant.op` by the grouped kernel: one tiling for any number of rows.

Legend: as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe_kernels.activations.op import Activation
from moe_kernels.combine.kernel import launch as combine
from moe_kernels.experts.kernel import aligned_rows
from moe_kernels.grouped_gemm import launch as gemm
from moe_kernels.plan.op import plan
from moe_kernels.plan.types import Plan

BLOCK_ROWS: Final = 64
_COMMON = {"BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3, "PERSIST": 0}
TILES: Final[Mapping[int, Mapping[str, int]]] = MappingProxyType(
    {2: MappingProxyType(_COMMON), 4: MappingProxyType({**_COMMON, "BLOCK_N": 64, "BLOCK_K": 32})}
)
"""By the bytes of an element. No table of tuned sizes is asked: its entries depend on the number of rows."""


def linear(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """A grouped product with one group."""
    bias_1O = None if bias_O is None else bias_O.contiguous().unsqueeze(0)
    return _product(aligned_rows(x_TI), w_OI.unsqueeze(0), one_group(len(x_TI), x_TI.device), bias_1O)


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
    """Plan, two grouped products, combine. Rows of h and out that no expert takes are neither written nor read."""
    groups = plan(ids_TK, len(w_down_EDF), block_rows=BLOCK_ROWS, local_E=local_E)
    h_SF = gemm.launch(
        aligned_rows(x_TD), w_in_E2FD, groups, "token", False, activation, bias_in_E2F, None, False,
        TILES[x_TD.element_size()], clear=False,
    )  # fmt: skip
    out_SD = _product(h_SF, w_down_EDF, groups, bias_down_ED)
    return combine(out_SD, groups.place_S.view(ids_TK.shape), weights_TK.contiguous())


def one_group(rows: int, device: torch.device) -> Plan:
    """The plan of ``rows`` rows of one matrix, in their order. Nothing waits for the device."""
    tiles = -(-rows // BLOCK_ROWS)
    order_T = torch.arange(rows, dtype=torch.int32, device=device)
    return Plan(
        order_S=order_T,
        place_S=order_T,
        ends_E=_number(rows, device),
        slots=1,
        block_rows=BLOCK_ROWS,
        tile_expert_M=torch.zeros(tiles, dtype=torch.int32, device=device),
        tile_row_M=torch.arange(0, rows, BLOCK_ROWS, dtype=torch.int32, device=device),
        tile_count_1=_number(tiles, device),
        dropped_1=_number(0, device),
    )


def _number(value: int, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def _product(x_SI: Tensor, w_EOI: Tensor, groups: Plan, bias_EO: Tensor | None = None) -> Tensor:
    tiles = TILES[x_SI.element_size()]
    return gemm.launch(x_SI, w_EOI, groups, None, False, "identity", bias_EO, None, False, tiles, clear=False)
