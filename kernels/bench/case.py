"""One thing to measure, with its inputs and what its output should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench import floors
from bench.bank import QUANTISED, Bank
from bench.draws import Draw
from bench.shapes import LayerShape
from moe_kernels.activations.op import Activation, activate, gated

CHECKED_ROWS: Final = 6
"""Rows whose output is recomputed in float32; spread over the call."""
OPS: Final = ("fused_moe", "grouped_mlp", "parallel_linear", "route", "plan", "route_plan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``x_TD`` are the tokens; for ``grouped_mlp`` and ``parallel_linear`` providers derive theirs from it.

    ``floor_us`` comes from the draw: see :mod:`bench.floors`.
    """

    op: str
    shape: LayerShape
    rows: int
    dtype: str
    bank: Bank
    draw: Draw
    x_TD: Tensor
    logits_TE: Tensor
    copies: int

    @property
    def device(self) -> str:
        return self.bank.device

    @property
    def activation(self) -> Activation:
        assert self.shape.gated == gated(self.shape.activation)
        return self.shape.activation  # type: ignore[return-value]  # a name of moe_kernels.activations.op by construction

    @property
    def floor_us(self) -> float:
        shape, pairs = self.shape, self.draw.pairs
        if self.op in ("fused_moe", "grouped_mlp"):
            return floors.layer_us(shape, pairs, self.draw.active, self.dtype)
        if self.op == "parallel_linear":
            matrix = shape.in_rows * shape.d
            weights = self.draw.active * matrix * floors.WEIGHT_BYTES[self.dtype]
            return max(floors.memory_us(weights), floors.compute_us(2.0 * pairs * matrix))
        logits, chosen = self.logits_TE.numel() * self.logits_TE.element_size(), pairs * 8
        order = pairs * 8 + shape.E * 4
        moved = {"route": logits + chosen, "plan": pairs * 4 + order, "route_plan": logits + chosen + order}
        return floors.memory_us(moved[self.op])


def make(op: str, shape: LayerShape, rows: int, dtype: str, bank: Bank, draw: Draw) -> Case:
    x_TD = bank.randn(rows, shape.d)
    logits_TE = bank.randn(rows, shape.E).float()
    copies = bank.copies(dtype, draw.active) if op in ("fused_moe", "grouped_mlp", "parallel_linear") else 1
    return Case(
        op=op, shape=shape, rows=rows, dtype=dtype, bank=bank, draw=draw, x_TD=x_TD, logits_TE=logits_TE, copies=copies
    )


def activation_dtype(dtype: str) -> str:
    """bf16 where the weights are integers."""
    return "bf16" if dtype in QUANTISED else dtype


def deviation(case: Case, y_TD: Tensor) -> float:
    """Norm of the difference to :func:`reference` over its norm, NaN if any element of the whole output is NaN."""
    if not bool(torch.isfinite(y_TD).all()):
        return float("nan")
    rows = checked_rows(case.rows)
    expected = reference(case, rows)
    return float((y_TD[rows].float() - expected).norm() / expected.norm().clamp_min(1e-30))


def checked_rows(rows: int) -> list[int]:
    """Spread from the first to the last. Example: 11 rows: 0, 2, 4, 6, 8, 10."""
    count = min(rows, CHECKED_ROWS)
    return [at * (rows - 1) // max(count - 1, 1) for at in range(count)]


def reference(case: Case, rows: list[int]) -> Tensor:
    """Outputs of those rows of the layer in float32, expert by expert, from the stored weights."""
    ids = case.draw.ids_TK[rows].tolist()
    y = torch.zeros(len(rows), case.shape.d, device=case.device)
    for at, (row, experts) in enumerate(zip(rows, ids, strict=True)):
        for slot, expert in enumerate(experts):
            w_in, w_down = case.bank.expert(case.dtype, expert)
            hidden = activate((w_in @ case.x_TD[row].float()).unsqueeze(0), case.activation)[0]
            y[at] += case.draw.weights_TK[row, slot] * (w_down @ hidden)
    return y
