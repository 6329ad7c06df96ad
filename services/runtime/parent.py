"""Lets no child outlive its parent, even if that is killed with -9: by the kernel on Linux, by a watch elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` after which the kernel kills the child as soon as the calling thread's process is gone.

    It survives exec, so it also holds for other programs. None where the kernel offers no such signal.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: afterwards only calls are safe
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the fork and the prctl
            os._exit(1)

    return before_exec


def watch_parent(parent: int, on_death: Callable[[], None] | None = None) -> threading.Thread:
    """Call ``on_death`` (default: the process kills itself) once ``parent`` is no longer this process's parent."""

    def kill_self() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        (on_death or kill_self)()

    thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
    thread.start()
    return thread
