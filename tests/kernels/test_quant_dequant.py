"""Codes to numbers inside kernels: every byte, exactly, in each dtype."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from testkit.gpu.dequant_triton import dot, unpack
from torch import Tensor

from moe_kernels.gemv.kernel import P16, P256

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_four_bits(dtype: torch.dtype) -> None:
    values = torch.full((2, 256), torch.nan, dtype=dtype)
    unpack[(1,)](BYTES, values, BITS=4, DTYPE=DTYPES[dtype], BLOCK=256)
    assert torch.equal(values.float(), torch.stack([BYTES & 15, BYTES >> 4]).float() - 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_eight_bits(dtype: torch.dtype) -> None:
    values = torch.full((256,), torch.nan, dtype=dtype)
    unpack[(1,)](BYTES, values, BITS=8, DTYPE=DTYPES[dtype], BLOCK=256)
    assert torch.equal(values.float(), BYTES.float() - 128)


def test_the_identities_hold_in_the_types_themselves() -> None:
    """What the kernels rely on: the patterns or-ed with a code are the numbers that the docstrings name."""
    codes = BYTES.to(torch.int16)
    assert torch.equal((codes | 0x6400).view(torch.float16).float(), 1024 + BYTES.float())
    assert torch.equal((codes[:16] | 0x4300).view(torch.bfloat16).float(), 128 + BYTES[:16].float())
    assert torch.equal(((codes & 0x7F) | 0x4300).view(torch.bfloat16).float(), 128 + (BYTES & 127).float())
    top = ((codes & 0x80) ^ 0x4380).view(torch.bfloat16).float()
    assert torch.equal(top, torch.where(BYTES < 128, 256.0, 128.0))
    wide = BYTES.to(torch.int32)
    assert torch.equal((wide | 0x4B000000).view(torch.float32), 2.0**23 + BYTES.float())
    assert torch.equal((wide[:16] << 19 | P16).view(torch.float32), 16 + BYTES[:16].float())
    assert torch.equal((wide << 15 | P256).view(torch.float32), 256 + BYTES.float())


def words(seed: int, count: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_integers_are_exact(bits: int) -> None:
    packed = words(bits)
    bytes_W4 = packed.view(torch.uint8).view(-1, 4)
    if bits == 8:
        codes_W8 = torch.cat([bytes_W4.float() - 128, torch.zeros(64, 4)], dim=1)
    else:
        codes_W8 = torch.cat([bytes_W4 & 15, bytes_W4 >> 4], dim=1).float() - 8
    x_W8 = torch.randint(-50, 50, (64, 8), generator=torch.Generator().manual_seed(9)).float()
    y_W = torch.full((64,), torch.nan)
    dot[(1,)](packed, x_W8, y_W, P16, P256, BITS=bits, BLOCK=64)
    assert torch.equal(y_W, (codes_W8 * x_W8).sum(1))
