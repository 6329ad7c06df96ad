"""paged_latent against its reference, for heads, types and lengths of all kinds; in a CUDA graph; and beside others."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from bench.bank import DTYPES
from bench.checks.base import Check, kernels, references, require, share
from bench.latent_case import LatentCase, Latents

SHAPES: Final = (
    Latents(name="128", heads=128),
    Latents(name="64", heads=64),
    Latents(name="16", heads=16),
    Latents(name="22", heads=22),
    Latents(name="6-odd", heads=6, size=36, rank=26),
)
STEPS: Final = {
    "decodes": tuple(range(1, 4000, 100)),
    "one": (20_000,),
    "long and short": (1, 17, 30_000, 0, 128, 129, 2048),
}
CPU_DIVISOR: Final = 100
"""Of lengths in the interpreter."""


def latent_checks() -> list[Check]:
    steps = [
        Check(
            name=f"latents {shape.name} {dtype} {step}",
            key=f"latents {shape.name} {dtype}",
            run=partial(check_step, shape, dtype, step),
        )
        for shape in SHAPES
        for dtype in ("bf16", "fp16", "fp32")
        for step in STEPS
    ]
    graphs = [
        Check(name=f"latents graph {dtype}", key=f"latents graph {dtype}", run=partial(check_graph, dtype))
        for dtype in ("bf16", "fp32")
    ]
    return steps + graphs


def check_step(shape: Latents, dtype: str, step: str, device: str) -> float:
    """The reference takes the same numbers in float32."""
    case = LatentCase(shape, _sized(STEPS[step], device), dtype, device, copies=1)
    with kernels(device):
        found = case()
    case.q_SNZ, case.latents_PBZ = case.q_SNZ.float(), case.latents_PBZ.float()
    with references():
        return share(found, case(), DTYPES[dtype])


def check_graph(dtype: str, device: str) -> float:
    """Captured once, replayed with other lengths and then the first ones: equal to plain calls."""
    case = LatentCase(SHAPES[0], _sized(STEPS["decodes"], device), dtype, device, copies=1)
    with kernels(device), torch.no_grad():
        plain = case()
        if device == "cpu":
            return 0.0
        first = case.kv_len_S.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case()
        for lengths in (first // 2, first):
            case.kv_len_S.copy_(lengths)
            graph.replay()
            require(torch.equal(captured, case()), "a replay differs from a plain call")
            require(torch.equal(captured, plain) == (lengths is first), "the lengths changed nothing")
    return 0.0


def _sized(lengths: tuple[int, ...], device: str) -> tuple[int, ...]:
    return lengths if device != "cpu" else tuple(-(-length // CPU_DIVISOR) for length in lengths)
