"""add_rms_norm and qk_norm_rope_write against their references: in float32, and rounding for rounding; and as a chain.

Legend: T rows, N query heads, J key/value heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.bank import DTYPES
from bench.checks.base import Check, kernels, random, references, require, share
from moe_kernels import backend
from moe_kernels.add_rms_norm.op import add_rms_norm
from moe_kernels.qk_norm_rope.op import qk_norm_rope_write

WIDTHS: Final = (2048, 4096, 100, 16_384)
ROWS: Final = (1, 17, 64, 1000, 16_384)
BLOCK: Final = 16
"""Positions of a block of the cache."""
EPS: Final = 1e-6
DIFFERENT: Final = 0.01
"""Share of elements that may be rounded the other way than by the reference: the order of a sum decides them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What a model's fused projection holds, and what happens to it. ``kv``: the rows' own keys are returned, too.
    ``rotated``: so many of the elements of a head are, None: all."""

    name: str
    heads: int
    kv_heads: int
    size: int
    norm: Literal["head", "projection"] | None = None
    clip: float | None = None
    kv: bool = False
    rotated: int | None = None
    interleaved: bool = False


PROJECTIONS: Final = (
    Projection(name="qwen3", heads=32, kv_heads=4, size=128, norm="head"),
    Projection(name="olmoe", heads=16, kv_heads=16, size=128, norm="projection"),
    Projection(name="mixtral", heads=32, kv_heads=8, size=128, kv=True),
    Projection(name="clipped", heads=64, kv_heads=8, size=128, norm="projection", clip=1.5, kv=True),
    Projection(name="wide", heads=5, kv_heads=1, size=256, norm="head", clip=1.5),
    Projection(name="odd", heads=6, kv_heads=2, size=24, norm="head", kv=True),
    Projection(name="glm-4.5", heads=96, kv_heads=8, size=128, norm="head", rotated=64),
    Projection(name="minimax-m2", heads=48, kv_heads=8, size=128, norm="projection", rotated=64, kv=True),
    Projection(name="odd part", heads=6, kv_heads=2, size=24, norm="head", rotated=10),
    Projection(name="none rotated", heads=6, kv_heads=2, size=128, norm="head", rotated=0),
    Projection(name="interleaved", heads=20, kv_heads=4, size=128, interleaved=True),
    Projection(name="odd interleaved", heads=6, kv_heads=2, size=24, rotated=10, interleaved=True, kv=True),
)


def dense_checks() -> list[Check]:
    found = [
        Check(
            name=f"add_rms_norm {dtype} {width} rows {rows} {added} added",
            key=f"add_rms_norm {dtype} {width}",
            run=partial(check_norm, dtype, width, rows, added),
        )
        for dtype in DTYPES
        for width in WIDTHS
        for rows in ROWS
        for added in (0, 1, 2)
    ]
    found += [
        Check(
            name=f"qk_norm_rope {case.name} {dtype} rows {rows}",
            key=f"qk_norm_rope {case.name} {dtype}",
            run=partial(check_projection, case, dtype, rows),
        )
        for case in PROJECTIONS
        for dtype in DTYPES
        for rows in ROWS
    ]
    found += [
        Check(
            name=f"add_rms_norm qk_norm_rope chain {dtype} rows {rows}",
            key=f"chain {dtype}",
            run=partial(check_chain, dtype, rows),
        )
        for dtype in DTYPES
        for rows in (1, 64, 500)
    ]
    return found


def check_norm(dtype: str, width: int, rows: int, added: int, device: str) -> float:
    kind = DTYPES[dtype]
    x_TD, *others = (random((_few(rows, device), width), kind, device, seed=seed) for seed in range(1 + added))
    weight_D = random((width,), kind, device, seed=9)
    y_TD, z_TD = [*others, None, None][:2]
    with kernels(device):
        sum_TD, h_TD = add_rms_norm(x_TD, y_TD, weight_D, EPS, z_TD=z_TD)
    with references():
        wanted_TD, rounded_TD = add_rms_norm(x_TD, y_TD, weight_D, EPS, z_TD=z_TD)
        _, exact_TD = add_rms_norm(sum_TD.float(), None, weight_D.float(), EPS)
    if not backend.upcast(kind):
        require(torch.equal(sum_TD, wanted_TD), "the sums are not torch's")
    _same_roundings(h_TD, rounded_TD)
    return share(h_TD, exact_TD, kind)


def check_projection(case: Projection, dtype: str, rows: int, device: str) -> float:
    inputs = _Inputs(case, dtype, _few(rows, device), device)
    with kernels(device):
        found = inputs.call()
    with references():
        rounded = inputs.call()
        exact = inputs.call(torch.float32)
    worst = 0.0
    for tensor, other, wanted in zip(found, rounded, exact, strict=True):
        _same_roundings(tensor, other)
        worst = max(worst, share(tensor, wanted, DTYPES[dtype]))
    for before, after in zip(inputs.cache, found[1:3], strict=True):
        spared = torch.ones(before.shape[0] * BLOCK, dtype=torch.bool, device=device)
        spared[inputs.slots_T] = False
        same = torch.equal(after.flatten(0, 1)[spared], before.flatten(0, 1)[spared])
        require(same, "places that no row names were written")
    return worst


def check_chain(dtype: str, rows: int, device: str) -> float:
    """Launched one after the other without a break, eight times over, in a CUDA graph: equal to calls with breaks."""
    inputs = _Inputs(PROJECTIONS[0], dtype, _few(rows, device), device)
    columns = inputs.qkv_TO.shape[1]
    width = PROJECTIONS[0].heads * PROJECTIONS[0].size
    x_TD = random((len(inputs.slots_T), width), DTYPES[dtype], device, seed=11)
    w_OD = random((columns, width), DTYPES[dtype], device, seed=12) / width**0.5
    weight_D = random((width,), DTYPES[dtype], device, seed=13)
    out_TD = torch.empty_like(x_TD)

    def run(pause: Callable[[], None]) -> None:
        sum_TD, y_TD = x_TD, None
        for _ in range(8):
            sum_TD, h_TD = add_rms_norm(sum_TD, y_TD, weight_D, EPS)
            pause()
            inputs.qkv_TO = F.linear(h_TD, w_OD)
            pause()
            q_TNH = inputs.call()[0]
            pause()
            y_TD = q_TNH.flatten(1)
        out_TD.copy_(add_rms_norm(sum_TD, y_TD, weight_D, EPS)[0])

    with kernels(device), torch.no_grad():
        run(torch.cuda.synchronize if device != "cpu" else lambda: None)
        if device == "cpu":
            return 0.0
        expected = out_TD.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(lambda: None)
        for _ in range(20):
            out_TD.zero_()
            graph.replay()
            require(torch.equal(out_TD, expected), "a replay differs from calls one by one")
    return 0.0


class _Inputs:
    """A projection, angles, and a cache of half as many places again, in no order."""

    def __init__(self, case: Projection, dtype: str, rows: int, device: str) -> None:
        self.case, kind = case, DTYPES[dtype]
        blocks = -(-rows * 3 // (2 * BLOCK)) + 1
        columns = (case.heads + 2 * case.kv_heads) * case.size
        self.qkv_TO = random((rows, columns), kind, device, seed=rows)
        self.weight_CH = None
        if case.norm is not None:
            self.weight_CH = random((case.heads + case.kv_heads, case.size), kind, device, seed=1)
        rotated = case.size if case.rotated is None else case.rotated
        angle_TI = random((rows, rotated // 2), torch.float32, device, seed=2) * 1000
        cos_TI, sin_TI = angle_TI.cos(), angle_TI.sin()
        self.cos_T1R = torch.cat((cos_TI, cos_TI), dim=1).unsqueeze(1)
        self.sin_T1R = torch.cat((-sin_TI, sin_TI), dim=1).unsqueeze(1)
        generator = torch.Generator().manual_seed(3)
        self.slots_T = torch.randperm(blocks * BLOCK, generator=generator)[:rows].to(device)
        shape = (blocks, BLOCK, case.kv_heads, case.size)
        self.cache = tuple(random(shape, kind, device, seed=seed) for seed in (4, 5))

    def call(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Queries, both caches as they are afterwards, and the rows' keys and values, computed in ``dtype``."""
        kind, case = dtype or self.qkv_TO.dtype, self.case
        k, v = (part.to(kind, copy=True) for part in self.cache)
        weight_CH = None if self.weight_CH is None else self.weight_CH.to(kind)
        q_TNH, kv = qk_norm_rope_write(
            self.qkv_TO.to(kind), self.cos_T1R, self.sin_T1R, k, v, self.slots_T,
            norm=case.norm or "head", weight_CH=weight_CH, eps=EPS, clip=case.clip, kv=case.kv,
            interleaved=case.interleaved,
        )  # fmt: skip
        return q_TNH, k, v, *(kv or ())


def _same_roundings(found: Tensor, expected: Tensor) -> None:
    """Of half types, where the interpreter rounds as GPUs do, which it does not in bfloat16."""
    if found.dtype == torch.float32 or backend.upcast(found.dtype):
        return
    different = float((found != expected).double().mean())
    require(different <= DIFFERENT, f"{different:.2%} of the elements are rounded in another way than the reference's")


def _few(rows: int, device: str) -> int:
    """The interpreter takes a millisecond for each program."""
    return rows if device != "cpu" else min(rows, 20)
