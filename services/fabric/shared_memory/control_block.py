"""The control block by which the host steers a step's kernels on the device: :mod:`moe_kernels.exchange.layout` names
its words.
"""

from __future__ import annotations

import torch

from moe_kernels.exchange.layout import ABORTED, FAILED, WORDS

_RING = 64


class ControlBlock:
    """Writes and reads ``words``, int64 on ``device``. Only :meth:`write` is ordered with the current stream's work."""

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
        self._side = torch.cuda.Stream(device, priority=-1) if self._gpu else None  # type: ignore[no-untyped-call]

    def write(self, values: dict[int, int]) -> None:
        """Queue a write of all words: ``values`` by index, 0 elsewhere. Does not wait for the current stream."""
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
        """End the waits of the running step at once, from any thread, ahead of queued work."""
        if self._side is None:
            self.words[FAILED] |= ABORTED
            return
        with torch.cuda.stream(self._side):
            self.words[FAILED : FAILED + 1].copy_(self._abort, non_blocking=True)

    def supersede(self) -> None:
        """End the step whose words were written last, even if its write is still queued, before the next write.

        Only the thread that writes may call this.
        """
        if self._side is None:
            self.abort()
            return
        self._side.wait_event(self._written[self._next - 1])
        self.abort()
        torch.cuda.current_stream(self.words.device).wait_stream(self._side)

    def raise_flag(self, index: int) -> None:
        """Set a word from 0 to 1, ahead of queued kernels; nobody may call :meth:`write` meanwhile."""
        if self._side is None:
            self.words[index] = 1
            return
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._written[self._next - 1])
            self.words[index : index + 1].copy_(self._one, non_blocking=True)
            self._side.synchronize()

    def read_word(self, index: int) -> int:
        """Return a word as it is now, ahead of kernels that were queued after the last :meth:`write`."""
        if self._side is None:
            return int(self.words[index])
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._written[self._next - 1])
            self._found.copy_(self.words[index : index + 1], non_blocking=True)
            self._side.synchronize()
        return int(self._found)

    def failed(self) -> int:
        """Wait for the current stream, then return the word FAILED."""
        self._found.copy_(self.words[FAILED : FAILED + 1], non_blocking=True)
        if self._gpu:
            torch.cuda.current_stream(self.words.device).synchronize()
        return int(self._found)
