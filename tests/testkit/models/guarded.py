"""Tensors that end where readable memory ends: what reads or writes one element too far crashes.

The interpreter checks no bounds, and a GPU only those of its allocator's large blocks.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

GUARD_BYTES = 1 << 20
PROT_NONE = 0
_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect


def guarded(tensor: Tensor, *, short: int = 0) -> Tensor:
    """A contiguous copy. Its last element lies ``short`` elements before the first page that nobody may touch, which
    is how to shift it off an alignment."""
    if not tensor.numel():
        return tensor
    used = (tensor.numel() + short) * tensor.element_size()
    whole = math.ceil(used / mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + GUARD_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    failed = _PROTECT(ctypes.c_void_p(address + whole), ctypes.c_size_t(GUARD_BYTES), PROT_NONE)
    assert not failed, ctypes.get_errno()
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - used)
    return flat.view(tensor.shape).copy_(tensor)
