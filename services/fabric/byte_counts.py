"""Counts the bytes that a worker exchanges with others, by what carried them and in which direction."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

Transport = Literal["tcp", "nccl"]
Direction = Literal["sent", "received"]


class ByteCounts:
    """Totals since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, transport: Transport, direction: Direction, nbytes: int) -> None:
        with self._lock:
            self._bytes[transport, direction] += nbytes

    def totals(self) -> dict[tuple[str, str], int]:
        """Return bytes by transport and direction."""
        with self._lock:
            return dict(self._bytes)
