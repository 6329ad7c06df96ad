"""The words by which a host steers a step's kernels, on the device: see :mod:`moe_kernels.exchange.layout`."""

from __future__ import annotations

import torch

from moe_kernels.exchange.layout import ABORTED, FAILED, WORDS

_RING = 64


class ControlBlock:
    """``words``: int64 on ``device``. Written in the order of the current stream, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(WORDS, dtype=torch.int64, device=device)
        self._gpu = device.type == "cuda"
        self._staging = torch.zeros(_RING, WORDS, dtype=torch.int64, pin_memory=self._gpu)
        self._rows = self._staging.numpy()  # the same memory: words one by one cost a tenth of what a tensor takes
        self._written = [torch.cuda.Event() for _ in range(_RING)] if self._gpu else []  # type: ignore[no-untyped-call]
        self._next = 0
        self._abort = torch.full((1,), ABORTED, dtype=torch.int64, pin_memory=self._gpu)
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=self._gpu)
        self._found = torch.zeros(1, dtype=torch.int64, pin_memory=self._gpu)
        self._aside = torch.cuda.Stream(device, priority=-1) if self._gpu else None  # type: ignore[no-untyped-call]

    def write(self, values: dict[int, int]) -> None:
        """Word by index; all others become 0."""
        at, self._next = self._next, (self._next + 1) % _RING
        if self._gpu:
            self._written[at].synchronize()
        row = self._rows[at]
        row[:] = 0
        for index, value in values.items():
            row[index] = value
        self.words.copy_(self._staging[at], non_blocking=True)
        if self._gpu:
            self._written[at].record(torch.cuda.current_stream(self.words.device))

    def abort(self) -> None:
        """End the waits of the step under way, from any thread, past all that is queued."""
        if self._aside is None:
            self.words[FAILED] |= ABORTED
            return
        with torch.cuda.stream(self._aside):
            self.words[FAILED : FAILED + 1].copy_(self._abort, non_blocking=True)

    def supersede(self) -> None:
        """End the step whose words were written last, even if the stream has not come to them, before the next write.

        For the thread that writes.
        """
        if self._aside is None:
            self.abort()
            return
        self._aside.wait_event(self._written[self._next - 1])
        self.abort()
        torch.cuda.current_stream(self.words.device).wait_stream(self._aside)

    def raise_flag(self, index: int) -> None:
        """A word that was 0 becomes 1, past all that is queued; none may be written meanwhile."""
        if self._aside is None:
            self.words[index] = 1
            return
        with torch.cuda.stream(self._aside):
            self._aside.wait_event(self._written[self._next - 1])
            self.words[index : index + 1].copy_(self._one, non_blocking=True)
            self._aside.synchronize()

    def told(self, index: int) -> int:
        """A word as kernels have it by now, past all that is queued since the words were written last."""
        if self._aside is None:
            return int(self.words[index])
        with torch.cuda.stream(self._aside):
            self._aside.wait_event(self._written[self._next - 1])
            self._found.copy_(self.words[index : index + 1], non_blocking=True)
            self._aside.synchronize()
        return int(self._found)

    def failed(self) -> int:
        """The failed word once everything queued on the current stream is done."""
        self._found.copy_(self.words[FAILED : FAILED + 1], non_blocking=True)
        if self._gpu:
            torch.cuda.current_stream(self.words.device).synchronize()
        return int(self._found)
