"""Memory of work that is over, back to the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def memory_trimmer() -> Callable[[], None]:
    """Gives what the C library holds free to the machine: glibc keeps hundreds of megabytes that a thread has used.
    Takes milliseconds; belongs in a thread. Does nothing with a library that has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
