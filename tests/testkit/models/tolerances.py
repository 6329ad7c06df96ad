"""How far apart two computations of the same thing may be. Exact things (ids, counts, order) use ``torch.equal``."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = {torch.float64: 64, torch.float32: 16, torch.float16: 4, torch.bfloat16: 4}
"""Spacings of the result's dtype at its largest magnitude. Half types: sums run in float32, so the few roundings
between the matrices decide. Wider types: the order of a sum does, which grows with its length (up to 1024 here)."""


def tolerance(expected: Tensor, dtype: torch.dtype, roundings: float | None = None) -> float:
    """Absolute, relative to the largest finite magnitude of ``expected``."""
    finite = expected.double().nan_to_num(0, 0, 0).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return (ROUNDINGS[dtype] if roundings is None else roundings) * torch.finfo(dtype).eps * largest


def assert_close(actual: Tensor, expected: Tensor, roundings: float | None = None) -> None:
    """``actual``, in its own dtype, is ``expected`` (often wider) up to the table. NaN and infinities match."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        atol=tolerance(expected, actual.dtype, roundings),
        rtol=0,
        equal_nan=True,
    )
