"""The store by which the two ends of a pair make a process group: its entries cross by a callback.

The callback sends them over the pair's proven connection, so that there is no rendezvous server to run or to trust.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from services.errors import SeatLost, WireError

_MAX_ENTRIES = 1 << 10


class PairStore(Store):
    """One end of a pair: a torch store. :meth:`put` takes entries that the other end has set.

    Args:
        prefix: goes before each key, so that several stores may share a connection.
        send: ``(key, value)``: sends an entry that was set here to the other end.
        seconds: longest wait for a key.
    """

    def __init__(self, prefix: str, send: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._prefix, self._send, self._seconds = prefix, send, seconds
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry of the other end; ``key`` has its prefix. Entries of other stores are kept and never read.

        Raises:
            WireError: the other end has sent too many.
        """
        with self._changed:
            if len(self._entries) >= _MAX_ENTRIES:
                raise WireError(f"The other end of a lane sent {_MAX_ENTRIES} entries of its stores.")
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry at both ends."""
        held = value.encode() if isinstance(value, str) else bytes(value)
        self.put(self._prefix + key, held)
        self._send(self._prefix + key, held)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return it. Raises SeatLost as :meth:`wait`."""
        self.wait([key])
        return self._entries[self._prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` are set."""
        return all(self._prefix + key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` are set. Raises SeatLost where the other end did not set them in time."""
        seconds = self._seconds if timeout is None else min(self._seconds, timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self.check(keys), seconds) or self._closed:
                raise SeatLost("The other end of a lane did not send its address.")

    def has_extended_api(self) -> bool:
        """Return False: torch then uses the methods above alone."""
        return False
