"""fused_moe and grouped_mlp: all shapes and dtypes of the tables, in every regime, against the reference in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import DTYPES, QUANTISED
from bench.checks.base import Check, Layer, kernels, layer, random, references, share
from bench.draws import Draw
from moe_kernels import tiles
from moe_kernels.activations.op import Activation
from moe_kernels.experts.op import fused_moe, grouped_mlp
from moe_kernels.experts.rounded_rows.reference import fused_moe as rounded_moe
from moe_kernels.quant.weight import QuantisedWeight

DIVISORS: Final = {
    "mixtral": 4,
    "qwen3-30b": 2,
    "olmoe": 2,
    "scattermoe": 4,
    "expertflow": 2,
    "deepseek-v3": 8,
    "ds-1.3b-moe128": 8,
    "glm-4.5-air": 4,
}
"""Layers of at most 400 MB that keep their number of experts and slots."""
MOVED_CODES: Final = 2.5
"""How many times more rounded rows may deviate. Rows that are not rounded would deviate 3.7 times as much."""
ROWS: Final = (1, 7, 32, 150, 1000)
"""One token, the small regime with and without few rows per expert, both sides of where the large one begins."""
DTYPE_PAIRS: Final = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    *((dtype, "bf16") for dtype in QUANTISED),
    ("int4", "fp16"),
    ("int8_channel", "fp16"),
)
"""Of the weights, of the activations."""


def layer_checks(scale: int) -> list[Check]:
    names = [f"{name}/{divisor * scale}" for name, divisor in DIVISORS.items()]
    cases = [(name, *pair) for name in names for pair in DTYPE_PAIRS] + [("tiny", "fp32", "fp32")]
    return _rounded_checks(scale) + [
        Check(name=f"{op} {name} {dtype} {kind} rows {rows}", key=f"{name} {dtype} {kind}", run=run)
        for name, dtype, kind in cases
        for rows in ROWS
        for op, run in (
            ("fused_moe", partial(check_fused_moe, name, dtype, kind, rows)),
            ("grouped_mlp", partial(check_grouped_mlp, name, dtype, kind, rows)),
        )
        if op == "fused_moe" or rows == 150
    ]


def _rounded_checks(scale: int) -> list[Check]:
    return [
        Check(
            name=f"fused_moe {name}/{divisor * scale} fp8 rounded rows {rows}",
            key=f"{name}/{divisor * scale} fp8 bf16",
            run=partial(check_rounded, f"{name}/{divisor * scale}", rows),
        )
        for name, divisor in DIVISORS.items()
        for rows in (7, 150, 1000)
    ]


def check_rounded(name: str, rows: int, device: str) -> float:
    """Rows rounded to FP8 as well, against a reference that rounds them alike, but for what another order of addition
    moves over the edge of a code."""
    made = layer(name, "fp8", "bf16", device)
    assert isinstance(made.w_in, QuantisedWeight)
    assert isinstance(made.w_down, QuantisedWeight)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    x_TD = random((rows, made.shape.d), torch.bfloat16, device, seed=rows)
    routes = draw.ids_TK, draw.weights_TK
    with kernels(device), tiles.overridden({"rounded_rows": {"FROM_ROWS": 1}}):
        found = fused_moe(x_TD, made.w_in, made.w_down, *routes, activation=act(made))
    with references():
        expected = rounded_moe(x_TD, made.w_in, made.w_down, *routes, act(made), None, None, "output", None, None, None)
    return share(found, expected, x_TD.dtype) / MOVED_CODES


def check_fused_moe(name: str, dtype: str, kind: str, rows: int, device: str) -> float:
    made = layer(name, dtype, kind, device)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    x_TD = random((rows, made.shape.d), DTYPES[kind], device, seed=rows)
    with kernels(device), _weight_only():
        found = fused_moe(x_TD, made.w_in, made.w_down, draw.ids_TK, draw.weights_TK, activation=act(made))
    return share(found, exact(made, x_TD, draw), x_TD.dtype)


def check_grouped_mlp(name: str, dtype: str, kind: str, rows: int, device: str) -> float:
    """A buffer with 9 rows more than the counts add up to, and every third expert empty."""
    made = layer(name, dtype, kind, device)
    counts_E = _counts(rows, made.shape.E, device)
    x_ND = random((rows + 9, made.shape.d), DTYPES[kind], device, seed=rows)
    with kernels(device), _weight_only():
        found = grouped_mlp(x_ND, counts_E, made.w_in, made.w_down, activation=act(made))
    with references():
        expected = grouped_mlp(x_ND.float(), counts_E, made.exact_in, made.exact_down, activation=act(made))
    return share(found, expected, x_ND.dtype)


def _weight_only() -> AbstractContextManager[None]:
    """Rows as they are, whatever the table says of FP8 weights."""
    return tiles.overridden({"rounded_rows": {"FROM_ROWS": 0}})


def exact(made: Layer, x_TD: Tensor, draw: Draw) -> Tensor:
    """The reference in float32 on the same numbers."""
    with references():
        return fused_moe(
            x_TD.float(), made.exact_in, made.exact_down, draw.ids_TK, draw.weights_TK, activation=act(made)
        )


def act(made: Layer) -> Activation:
    return made.shape.activation  # type: ignore[return-value]  # a name of moe_kernels.activations.op by construction


def _counts(rows: int, experts: int, device: str) -> Tensor:
    """Rows dealt unevenly over experts 0, 1, 3, 4, 6, ... Example: 10 rows, 4 experts: 5, 3, 0, 2."""
    weights = torch.tensor([0.0 if e % 3 == 2 else 1.0 / (1 + e) for e in range(experts)])
    counts = (weights / weights.sum() * rows).floor().int()
    counts[0] += rows - int(counts.sum())
    return counts.to(device)
