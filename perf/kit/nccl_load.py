"""Load on a link while workers die and join: every sum checked, the longest wait kept."""

from __future__ import annotations

import threading
import time

import torch

from perf.kit.nccl_bench import SCALED, SCALES, rows_of
from services.fabric.tcp.link import TcpLink


class Load(threading.Thread):
    """Dispatches two handles at a time, holds each sum against what it must be, keeps the longest combine."""

    def __init__(self, link: TcpLink, device: torch.device) -> None:
        super().__init__(daemon=True)
        self._link, self._device = link, device
        self.stop, self.error, self.count = threading.Event(), None, 0
        self._longest = 0.0

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self._twice()
        except BaseException as error:  # noqa: BLE001  looked at by the main thread
            self.error = error

    def _twice(self) -> None:
        x_TD, ids_TK, weights_TK = rows_of(64, 4, self.count, self._device)
        dyadic_TK = torch.full_like(weights_TK, 0.25)
        scale_T1 = (torch.tensor(SCALES, device=x_TD.device)[ids_TK] * dyadic_TK).sum(1, keepdim=True)
        handles = [self._link.dispatch(SCALED, x_TD, ids_TK, dyadic_TK) for _ in range(2)]
        for handle in handles:
            began = time.monotonic()
            y_TD = self._link.combine(handle)
            self._longest = max(self._longest, time.monotonic() - began)
            assert torch.equal(y_TD, x_TD * scale_T1)
            self.count += 1

    def wait(self, more: int) -> None:
        target, until = self.count + more, time.monotonic() + 30
        while self.count < target and self.error is None:
            assert time.monotonic() < until, "the load stands still"
            time.sleep(0.002)

    def longest(self) -> float:
        longest, self._longest = self._longest, 0.0
        return longest
