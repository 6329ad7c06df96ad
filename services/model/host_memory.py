"""Memory of the host for large tensors, in huge pages where the system gives them.

Making a page costs as much as reading 4 KiB from the page cache, so weights in small pages load at half the speed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of any contents. Memory of a large one on the host goes back to the system once it is dropped.

    Raises:
        torch.OutOfMemoryError: there is not so much memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise torch.OutOfMemoryError(f"no {nbytes:,} bytes of memory: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def release_pinned() -> None:
    """Give pinned memory that is no longer used back to the system: torch keeps it for whoever wants some next, which
    after loading nobody does. Waits for copies out of it. A torch without a way to do it keeps it."""
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def give_back(storage: torch.UntypedStorage) -> None:
    """Give the memory of ``storage`` back to the system. What :func:`empty` mapped stays in place, of any contents and
    without pages until it is written to; other storages are empty until ``resize_``. Small ones that numpy has seen
    cannot be resized, and stay."""
    if storage.resizable():
        storage.resize_(0)
    elif storage.nbytes() >= HUGE_PAGE_BYTES and storage.data_ptr() % mmap.PAGESIZE == 0:
        pages = storage.data_ptr(), storage.nbytes()
        if ctypes.CDLL(None, use_errno=True).madvise(*map(ctypes.c_size_t, pages), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
