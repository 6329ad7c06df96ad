"""What two ends of a pair tell each other while they make a process group: a store whose entries cross by a callback.

The callback is the connection that both have proven themselves on, so there is no rendezvous server to run or to trust.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from services.errors import SeatLost, WireError

_MAX_ENTRIES = 1 << 10
Tell = Callable[[str, bytes], None]


class PairStore(Store):
    """One end. What is set here is told to the other one; what that one told comes in by :meth:`put`.

    Args:
        prefix: goes before each key, so that several stores may share a connection.
        seconds: longest wait for a key.
    """

    def __init__(self, prefix: str, tell: Tell, seconds: float) -> None:
        super().__init__()
        self._prefix, self._tell, self._seconds = prefix, tell, seconds
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """``key`` with its prefix; other stores' keys are kept and never asked for.

        Raises:
            WireError: nobody has so many.
        """
        with self._changed:
            if len(self._entries) >= _MAX_ENTRIES:
                raise WireError(f"The other end of a lane told {_MAX_ENTRIES} entries of its stores.")
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        held = value.encode() if isinstance(value, str) else bytes(value)
        self.put(self._prefix + key, held)
        self._tell(self._prefix + key, held)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[self._prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises SeatLost where the other end did not set all of ``keys`` in time."""
        seconds = self._seconds if timeout is None else min(self._seconds, timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self.check(keys), seconds) or self._closed:
                raise SeatLost("The other end of a lane did not say how to reach it.")

    def has_extended_api(self) -> bool:
        return False
