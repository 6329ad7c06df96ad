"""Reads counters that kernels add to, for metrics and heartbeats, without waiting for the steps of their device.

Legend: L layers, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def side_stream(device: torch.device, *, needed: bool = True) -> AbstractContextManager[object]:
    """Run this thread's work on a new stream of ``device``, which waits for no other stream.

    Nothing changes where it is not ``needed``, or where ``device`` is a CPU.
    """
    if not needed or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Counters:
    """Copies counters from a device to the host on a side stream. Thread-safe.

    A copy on the default stream would wait for the running step and would meanwhile block launches of other threads.
    If that step waits for an expert kernel of this process that is not launched yet, both would wait until the deadline
    of the step. Increments that kernels make during the copy may be missing from the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[tuple[int, int], Tensor] = {}

    def read(self, counts: Tensor | Sequence[Tensor]) -> list[list[int]]:
        """Return the values of ``counts``: an int64 matrix, or int64 vectors of one length on one device.

        The first call for a shape allocates pinned memory and may wait for the device.
        """
        if not len(counts) or counts[0].device.type != "cuda":
            return [counts_E.tolist() for counts_E in counts]
        device, shape = counts[0].device, (len(counts), len(counts[0]))
        with self._lock, torch.cuda.device(device), torch.inference_mode():
            stream = self._streams.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
            if shape not in self._pinned:
                self._pinned[shape] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            host_LE = self._pinned[shape]
            with torch.cuda.stream(stream):
                if isinstance(counts, Tensor):
                    host_LE.copy_(counts, non_blocking=True)
                else:
                    for host_E, counts_E in zip(host_LE, counts, strict=True):
                        host_E.copy_(counts_E, non_blocking=True)
                stream.synchronize()
            values: list[list[int]] = host_LE.tolist()
            return values
