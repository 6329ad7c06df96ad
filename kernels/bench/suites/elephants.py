"""What "Who Says Elephants Can't Run" measures: integers to floats (its table 1), and int8 and int4 expert layers.

Section 4.1 measures the GEMM with the dequantisation fused, over 1..32 active experts, relative to float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from bench import draws, floors
from bench.bank import Bank
from bench.case import Case, make
from bench.measuring import Settings, measure_case, release
from bench.providers import PROVIDERS
from bench.providers.base import require
from bench.results import Row
from bench.shapes import LayerShape
from bench.suites.modules import timed
from bench.timing import Call, copies_for
from moe_kernels import backend
from moe_kernels.quant.op import quantize_experts
from moe_kernels.quant.weight import QuantisedWeight

ACTIVE: Final = (1, 4, 8, 16, 24, 32)
ROWS_EACH: Final = 8
"""Tokens of each active expert."""
SHAPE: Final = LayerShape(
    name="elephants", title="Z-code M3", d=1024, f=4096, E=32, k=1, activation="relu", tuned=False
)
COLUMNS: Final = {
    "fp16": (16, False),
    "int8 native": (8, True),
    "int8 trick": (8, False),
    "int4 native": (4, True),
    "int4 trick": (4, False),
}
"""Bits, and whether the conversion unit is used."""


def table1(settings: Settings) -> Iterator[Row]:
    """One product ``[f, d]`` per active expert; only the conversion differs between columns."""
    shape = SHAPE.scaled(settings.scale)
    for active in ACTIVE:
        for provider, (bits, native) in COLUMNS.items():
            dtype = {16: "fp16", 8: "int8_channel", 4: "int4_channel"}[bits]
            weights = active * (shape.f * shape.d * floors.WEIGHT_BYTES[dtype] + (bits < 16) * 2 * shape.f)
            row = Row(
                suite=settings.suite, op="convert_gemm", provider=provider, shape=f"{shape.name}-a{active}",
                rows=active * ROWS_EACH, dtype=dtype, floor_us=floors.memory_us(weights),
            )  # fmt: skip
            copies = copies_for(weights, weights, 20e9) if settings.on_gpu else 1

            def build(bits: int = bits, native: bool = native, active: int = active, copies: int = copies) -> Call:
                return _convert_call(shape, active, bits, native, copies, settings)

            yield timed(build, row, settings, graph=True, memory=False, copies=copies)


def gemm(settings: Settings) -> Iterator[Row]:
    """The library's whole layer on the same draws, in each dtype."""
    shape = SHAPE.scaled(settings.scale)
    bank = Bank(shape, settings.device, activation_dtype="fp16" if settings.on_gpu else "fp32", seed=settings.seed)
    dtypes = ("fp16" if settings.on_gpu else "fp32", "int8", "int8_channel", "int4", "int4_channel")
    for active in ACTIVE:
        draw = draws.over_first(active * ROWS_EACH, active, 1, seed=settings.seed, device=settings.device)
        for dtype in dtypes:
            case: Case = make("fused_moe", shape, active * ROWS_EACH, dtype, bank, draw)
            yield from measure_case(case, {"ours": PROVIDERS["ours"]}, settings)
    del bank
    release(settings)


def _convert_call(shape: LayerShape, active: int, bits: int, native: bool, copies: int, settings: Settings) -> Call:
    require(settings.on_gpu or backend.INTERPRETED, "a Triton kernel: needs a GPU")
    from bench.suites import elephants_triton

    half = torch.float16
    x = torch.randn(active, ROWS_EACH, shape.d, dtype=half, device=settings.device)
    y = torch.full((active, ROWS_EACH, shape.f), torch.nan, dtype=half, device=settings.device)
    w = torch.randn(active, shape.f, shape.d, dtype=half, device=settings.device).div_(math.sqrt(shape.d))
    stored, scales, exact = _stored(w, bits)
    layers = [stored.clone() for _ in range(copies)]

    def call(number: int) -> Tensor:
        weight = layers[number % copies]
        return elephants_triton.launch(x, weight, scales, y, bits=bits, native=native)

    expected = torch.einsum("ari,aoi->aro", x.float(), exact)
    off = float((call(0).float() - expected).norm() / expected.norm())
    if not off < 1e-2:
        raise AssertionError(f"deviates by {off:.3g} from float32")
    return call


def _stored(w: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as stored, scales, and what they mean in float32."""
    if bits == 16:
        return w, w, w.float()
    from moe_kernels.quant.op import dequantize_experts

    q: QuantisedWeight = quantize_experts(w, bits, 0)
    return q.packed, q.scales, dequantize_experts(q)
