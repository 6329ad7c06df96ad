"""Reads tensors as files have them. Files are not mapped: where one is cut short meanwhile, a map ends the process.

In: an open file, and what its header says. Out: bytes in a place, or a tensor of the host.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from services.errors import CheckpointError
from services.model.header import DOWNLOAD_AGAIN, TensorEntry

DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Types of tensors that are read, by their names in safetensors."""
Select = tuple[int | slice, ...]


def read_bytes(descriptor: int, into: Tensor, at: int, *, name: str, file: Path) -> None:
    """Fill ``into``, a contiguous tensor of the host with one dimension, with the file's bytes from ``at`` on.

    Raises:
        CheckpointError: the file ends before, or cannot be read. ``name`` says of which tensor the bytes are.
    """
    left = into.view(torch.uint8).numpy().data
    try:
        while left:
            if not (count := os.preadv(descriptor, [left], at)):
                raise CheckpointError(f"{file} was truncated while it was read.", hint=DOWNLOAD_AGAIN)
            left, at = left[count:], at + count
    except OSError as error:
        raise CheckpointError(f'{file}: "{name}" cannot be read: {error}.', hint=DOWNLOAD_AGAIN) from error


def read_tensor(descriptor: int, entry: TensorEntry, name: str, select: Select = ()) -> Tensor:
    """Return a tensor in the dtype that it has in its file, or ``[select]`` of it. Of what a leading number leaves out
    nothing is read.

    Raises:
        CheckpointError: as by :func:`read_bytes`.
    """
    dtype, shape, at = DTYPES[entry.dtype], entry.shape, entry.begin
    while select and isinstance(index := select[0], int):
        shape, select = shape[1:], select[1:]
        at += index * math.prod(shape) * dtype.itemsize
    flat = torch.empty(math.prod(shape), dtype=dtype)
    read_bytes(descriptor, flat, at, name=name, file=entry.file)
    return flat.view(shape)[select] if select else flat.view(shape)
