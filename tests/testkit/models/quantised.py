"""Quantised weights of every format with any codes and scales: not what rounding would choose, but what can be held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from moe_kernels import QuantisedWeight

KINDS: Mapping[str, Mapping[str, Any]] = {
    "int4 g128": {"bits": 4, "group": 128},
    "int4 channel": {"bits": 4, "group": 0},
    "int8 g128": {"bits": 8, "group": 128},
    "int8 channel": {"bits": 8, "group": 0},
    "int4 g32": {"bits": 4, "group": 32},
    "int4 g128 zeros": {"bits": 4, "group": 128, "zeros": True},
    "int4 g64 zeros": {"bits": 4, "group": 64, "zeros": True, "scale_type": torch.bfloat16},
    "int4 channel zeros": {"bits": 4, "group": 0, "zeros": True},
    "int8 g32 zeros": {"bits": 8, "group": 32, "zeros": True, "scale_type": torch.float32},
    "int4 g64 order": {"bits": 4, "group": 64, "ordered": True},
    "e4m3 4x128": {"bits": 8, "group": 128, "codes": "e4m3", "scale_rows": 4},
    "e4m3 channel": {"bits": 8, "group": 0, "codes": "e4m3"},
    "e2m1 g32": {"bits": 4, "group": 32, "codes": "e2m1"},
}


def random_weight(kind: str, experts: int, rows: int, columns: int, seed: int = 0) -> QuantisedWeight:
    """Values of order 1 / sqrt(columns), so that products with rows of order 1 are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(KINDS[kind])
    sizes["scale_rows"] = math.gcd(sizes.get("scale_rows", 1), rows)
    q = QuantisedWeight.empty((experts, rows, columns), **sizes)
    q.packed.random_(0, 256, generator=generator)
    if q.codes == "e4m3":
        q.packed[(q.packed & 0x7F) > 0x77] = 0x30
    largest = {"int": 2.0 ** (q.bits - 1), "e4m3": 256.0, "e2m1": 6.0}[q.codes] * math.sqrt(columns)
    if q.codes == "e2m1":
        q.scales.copy_(torch.randint(-2, 2, q.scales.shape, generator=generator) + 127 - round(math.log2(largest)))
    else:
        q.scales.copy_((torch.rand(q.scales.shape, generator=generator) + 0.5) / largest)
    if q.zeros is not None:
        q.zeros.random_(1 << (q.bits - 2), 3 << (q.bits - 2), generator=generator)
    if q.order is not None:
        q.order.copy_(torch.stack([torch.randperm(columns, generator=generator) for _ in range(experts)]))
    return q
