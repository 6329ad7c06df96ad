"""Counters on a device that kernels add to, read by threads for metrics and heartbeats while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Counters:
    """Reads beside the device's queue: it waits for no step, and no launch of another thread waits for it.

    A copy in the order of the default stream would wait for the step under way there, holding what launches need; and
    where that step waits for a seat of this very process, which is yet to be launched, until its deadline.
    What is counted while it reads may be told or not. From any thread.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[tuple[int, int], Tensor] = {}

    def read(self, counts: Sequence[Tensor]) -> list[list[int]]:
        """Values of ``counts``, int64 vectors of one length, on one device."""
        if not counts or counts[0].device.type != "cuda":
            return [counts_E.tolist() for counts_E in counts]
        device, shape = counts[0].device, (len(counts), len(counts[0]))
        with self._gate, torch.cuda.device(device), torch.inference_mode():
            stream = self._streams.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
            if shape not in self._pinned:  # once: making it may wait for the device
                self._pinned[shape] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            told_LE = self._pinned[shape]
            with torch.cuda.stream(stream):
                for told_E, counts_E in zip(told_LE, counts, strict=True):
                    told_E.copy_(counts_E, non_blocking=True)
                stream.synchronize()
            values: list[list[int]] = told_LE.tolist()
            return values
