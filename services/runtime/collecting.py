"""Python's collector of cycles, kept from running where what it frees must not be freed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_gate = threading.Lock()
_holders = 0
_enabled = False


@contextmanager
def no_collection() -> Iterator[None]:
    """No cycles are collected meanwhile, in any thread. While one captures a CUDA graph, pinned memory of something
    else that its collector happens to free would end the process: torch records an event for that."""
    global _holders, _enabled
    with _gate:
        if _holders == 0:
            _enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _gate:
            _holders -= 1
            if _holders == 0 and _enabled:
                gc.enable()
