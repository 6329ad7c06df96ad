"""What threads do with a device beside its steps: counters that kernels add to are read for metrics and heartbeats."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def beside(device: torch.device) -> AbstractContextManager[object]:
    """This thread's work goes to a new stream of ``device``, a GPU, that waits for no other."""
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Counters:
    """Reads beside the device's queue: it waits for no step, and no launch of another thread waits for it.

    A copy in the order of the default stream would wait for the step under way there, holding what launches need; and
    where that step waits for a seat of this very process, which is yet to be launched, until its deadline.
    What is counted while it reads may be told or not. From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[tuple[int, int], Tensor] = {}

    def read(self, counts: Tensor | Sequence[Tensor]) -> list[list[int]]:
        """Values of ``counts``, int64: a matrix, or vectors of one length on one device. The first time of a shape may
        wait for the device."""
        if not len(counts) or counts[0].device.type != "cuda":
            return [counts_E.tolist() for counts_E in counts]
        device, shape = counts[0].device, (len(counts), len(counts[0]))
        with self._lock, torch.cuda.device(device), torch.inference_mode():
            stream = self._streams.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
            if shape not in self._pinned:
                self._pinned[shape] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            told_LE = self._pinned[shape]
            with torch.cuda.stream(stream):
                if isinstance(counts, Tensor):
                    told_LE.copy_(counts, non_blocking=True)
                else:
                    for told_E, counts_E in zip(told_LE, counts, strict=True):
                        told_E.copy_(counts_E, non_blocking=True)
                stream.synchronize()
            values: list[list[int]] = told_LE.tolist()
            return values
