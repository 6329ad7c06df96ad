"""Memory of the host for large tensors, in huge pages where the system gives them.

Making a page costs as much as reading 4 KiB from the page cache, so weights in small pages load at half the speed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
RESERVED_SHARE = 20


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


def spare(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may take and leave the host, or its container, a twentieth of its memory.
    Below zero where there is less already; any number where the system does not say."""
    try:
        facts = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    except OSError:
        return sys.maxsize
    total, available = (int(facts[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    found = available - total // RESERVED_SHARE
    for folder in _own_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):  # "max", or none here
            most = int((folder / "memory.max").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
            found = min(found, most - used - most // RESERVED_SHARE)
    return found


def _own_cgroups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own to the root."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, _, path = line.partition("::")
            if number == "0":
                own = cgroups / path.lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(cgroups))


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
