"""ScatterMoE's figures 4b, 4c, 5 and 6: one MoE MLP, forward and training, time and memory.

Section 3: d_model 4096, d_ff = 2 d_model active, d_expert = d_ff / k, E = 8k, T = 30 x 2048.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch

from bench import draws, floors
from bench.bank import DTYPES
from bench.draws import Draw
from bench.measuring import Settings
from bench.results import Row
from bench.shapes import LayerShape, find
from bench.suites.modules import KINDS, forward_call, timed, training_call

TOKENS: Final = 30 * 2048
GRANULARITY: Final = (1, 2, 4, 8, 16)
SPARSITY: Final = (2, 4, 8, 16, 24, 30)
SPARSITY_EXPERTS: Final = 64
SPARSITY_WIDTH: Final = 512


def unit(settings: Settings) -> Iterator[Row]:
    """Figures 4b and 4c: E 32, k 4, d_expert 2048."""
    shape = find("scattermoe").scaled(settings.scale)
    yield from mlp_rows(shape, ("ours", "grouped_mm", "torch"), settings)


def granularity(settings: Settings) -> Iterator[Row]:
    """Figure 5: experts are split ever finer at constant active and total parameters."""
    for slots in GRANULARITY:
        yield from mlp_rows(granular(slots).scaled(settings.scale), ("ours", "grouped_mm"), settings)


def sparsity(settings: Settings) -> Iterator[Row]:
    """Figure 6: 64 experts of d_expert 512, ever more of them active, against the dense MLP of the same parameters."""
    for slots in SPARSITY:
        yield from mlp_rows(sparse(slots).scaled(settings.scale), ("ours", "grouped_mm"), settings, fewer=4)
    yield from mlp_rows(dense().scaled(settings.scale), ("torch",), settings, fewer=4)


def granular(slots: int) -> LayerShape:
    return _shape(f"granularity-k{slots}", f=8192 // slots, experts=8 * slots, slots=slots)


def sparse(slots: int) -> LayerShape:
    return _shape(f"sparsity-k{slots}", f=SPARSITY_WIDTH, experts=SPARSITY_EXPERTS, slots=slots)


def dense() -> LayerShape:
    return _shape("dense", f=SPARSITY_WIDTH * SPARSITY_EXPERTS, experts=1, slots=1)


def mlp_rows(shape: LayerShape, providers: Sequence[str], settings: Settings, *, fewer: int = 1) -> Iterator[Row]:
    """Forward without gradients, then forward and backward, of each provider. ``fewer`` divides the tokens."""
    dtype = "bf16" if settings.on_gpu else "fp32"
    count = settings.tokens or TOKENS // fewer
    draw = draws.uniform(count, shape.E, shape.k, seed=settings.seed, device=settings.device)
    x_TD = torch.randn(count, shape.d, dtype=DTYPES[dtype], device=settings.device)
    for provider in providers:
        torch.manual_seed(settings.seed)
        module = KINDS[provider](shape, DTYPES[dtype], settings.device)
        forward, training = _rows(shape, draw, provider, dtype, settings)
        yield timed(partial(forward_call, module, x_TD, draw), forward, settings, graph=not module.waits)
        yield timed(partial(training_call, module, x_TD, draw), training, settings)


def _rows(shape: LayerShape, draw: Draw, provider: str, dtype: str, settings: Settings) -> tuple[Row, Row]:
    def row(op: str, floor_us: float) -> Row:
        return Row(
            suite=settings.suite, op=op, provider=provider, shape=shape.name, rows=draw.ids_TK.shape[0], dtype=dtype,
            floor_us=floor_us,
        )  # fmt: skip

    forward = floors.layer_us(shape, draw.pairs, draw.active, dtype)
    training = floors.training_us(shape, draw.pairs, draw.active, dtype)
    return row("mlp.forward", forward), row("mlp.training", training)


def _shape(name: str, *, f: int, experts: int, slots: int) -> LayerShape:
    return LayerShape(name=name, title=name, d=4096, f=f, E=experts, k=slots, activation="gelu", tuned=False)
