"""Rows of pairs in their three layouts, and the per-expert linear layer on them as a loop over pairs.

Legend: T tokens, K slots per token, S = T x K pairs (pair p = t K + k), E experts, I input columns, O output columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.plan.op import plan
from moe_kernels.plan.types import Plan
from moe_kernels.training.parallel_linear import parallel_linear

LAYOUTS = ["token", "pair", "grouped"]
OUTPUTS = ["gates", "pair", "grouped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``x`` by token is ``[T, I]``; ids outside 0..E-1 are pairs that no expert takes."""

    x_TI: Tensor
    w_EOI: Tensor
    bias_EO: Tensor
    gates_TK: Tensor
    ids_TK: Tensor
    plan: Plan

    def stored(self, layout: str) -> Tensor:
        """The same rows in another layout, as a leaf."""
        slots = self.plan.slots
        x_SI = self.x_TI.repeat_interleave(slots, 0)
        by = {"token": self.x_TI, "pair": x_SI, "grouped": x_SI[self.plan.order_S.long()]}
        return by[layout].clone()


def case(
    ids: list[list[int]] | Tensor, *, inputs: int, outputs: int, experts: int, dtype: torch.dtype, seed: int = 0
) -> Case:
    """Tiles of 16 rows, so that few rows already make several."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    ids_TK = torch.as_tensor(ids, dtype=torch.int64)
    return Case(
        x_TI=normal(ids_TK.shape[0], inputs),
        w_EOI=normal(experts, outputs, inputs),
        bias_EO=normal(experts, outputs),
        gates_TK=normal(*ids_TK.shape).to(torch.promote_types(dtype, torch.float32)),
        ids_TK=ids_TK,
        plan=plan(ids_TK, experts, block_rows=16),
    )


def random_ids(tokens: int, slots: int, experts: int, *, absent: float = 0.0, seed: int = 0) -> Tensor:
    """Distinct experts per token; a share ``absent`` of the pairs goes to no expert here."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots]
    return ids_TK.masked_fill(torch.rand(tokens, slots, generator=generator) < absent, experts)


def linear(
    it: Case, layout: str, output: str, x: Tensor, w_EOI: Tensor, bias_EO: Tensor | None, gates_TK: Tensor
) -> Tensor:
    """parallel_linear on rows in ``layout``; the gates only where they sum a token's rows."""
    return parallel_linear(
        x,
        w_EOI,
        it.plan,
        gates=gates_TK if output == "gates" else None,
        grouped_in=layout == "grouped",
        grouped_out=output == "grouped",
        bias_EO=bias_EO,
        fan_out=1 if layout == "pair" else None,
    )


def linear_by_pair(x: Tensor, w_EOI: Tensor, bias_EO: Tensor | None, ids_TK: Tensor, plan: Plan, layout: str) -> Tensor:
    """``[S, O]`` by pair in float64, differentiable: one product per pair, zeros where no expert takes it."""
    slots = ids_TK.shape[1]
    rows = []
    for pair, expert in enumerate(ids_TK.flatten().tolist()):
        place = int(plan.place_S[pair])
        source = {"token": pair // slots, "pair": pair, "grouped": place}[layout]
        if place < 0:
            rows.append(torch.zeros(w_EOI.shape[1], dtype=torch.float64))
            continue
        row_O = w_EOI[expert].double() @ x[source].double()
        rows.append(row_O if bias_EO is None else row_O + bias_EO[expert].double())
    return torch.stack(rows) if rows else torch.zeros(0, w_EOI.shape[1], dtype=torch.float64)


def by_layout(y_SO: Tensor, plan: Plan, gates_TK: Tensor | None, grouped_out: bool) -> Tensor:
    """From rows by pair to what ``parallel_linear`` returns."""
    if gates_TK is not None:
        return (y_SO.view(*gates_TK.shape, -1) * gates_TK.unsqueeze(2)).sum(1)
    return y_SO[plan.order_S.long()] if grouped_out else y_SO
