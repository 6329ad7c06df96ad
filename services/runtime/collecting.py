"""Keeps Python's collector of cycles from running while it could free what must stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_enabled = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no cycles inside, in any thread. While a CUDA graph is captured, the collector might free pinned memory:
    torch records an event for that, which a capture does not allow, and the process ends."""
    global _holders, _enabled
    with _lock:
        if _holders == 0:
            _enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _enabled:
                gc.enable()
