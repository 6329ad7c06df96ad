"""What was read of a quantised weight, and checks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.errors import CheckpointError

HINT = "Download the file again, or quantise the model again."


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor as it is in ``file``."""

    tensor: Tensor
    name: str
    file: Path

    def wrong(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(f'{self.file}: tensor "{self.name}" must hold {expected}, found {found}.', hint=HINT)


Parts = Mapping[str, Part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A weight of N rows and K columns: ``(table[codes] or codes - zeros) x scales``.

    ``scales_NG`` and ``zeros_NG`` are for groups of columns, of which ``group_K`` says which column is in which.
    """

    codes_NK: Tensor
    scales_NG: Tensor
    group_K: Tensor
    zeros_NG: Tensor | None = None
    table: Tensor | None = None


def scales_of(part: Part) -> Tensor:
    """Return scales in float32; bytes are powers of two.

    Raises:
        CheckpointError: one is 0, no number, or too large for its type.
    """
    stored = part.tensor
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = _powers(stored.contiguous().view(torch.uint8))
    else:
        scales = stored.float()
    bad = ~scales.isfinite() | (scales == 0)
    if bad.any():
        at = [int(index) for index in bad.nonzero()[0]]
        found = _kind(float(scales[tuple(at)]), str(stored.dtype).removeprefix("torch."))
        raise part.wrong("finite scales other than 0", f"{found} at {at}")
    return scales


def _powers(bytes_: Tensor) -> Tensor:
    """Return ``2 ** (byte - 127)`` by the bits of float32, which has the same exponents; NaN for 255."""
    bits = bytes_.int() << 23
    bits[bytes_ == 0] = 1 << 22  # below the normal numbers
    values = bits.view(torch.float32)
    values[bytes_ == 255] = torch.nan
    return values


def _kind(value: float, dtype: str) -> str:
    if value == 0:
        return "0"
    return "NaN" if value != value else f"one too large for {dtype} (infinity)"


def equal_groups(columns: int, size: int) -> Tensor:
    """Return each column's group, of ``size`` columns each."""
    return torch.arange(columns) // size


def order_of(part: Part, groups: int) -> Tensor:
    """Return each column's group as the checkpoint orders them.

    Raises:
        CheckpointError: a group is none.
    """
    order_K = part.tensor.long()
    if order_K.numel() and not 0 <= int(order_K.min()) <= int(order_K.max()) < groups:
        found = f"{int(order_K.min())} to {int(order_K.max())}"
        raise part.wrong(f"groups from 0 to {groups - 1}", found)
    return order_K


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words along the last dimension as uint8, those of a word's lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes: Tensor = ((data.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return codes
