"""Running before all other processes of a machine, so that sending on time does not depend on what else it does."""

from __future__ import annotations

import os

from loadgen.errors import BadSetting


def go_first() -> None:
    """Give this process, and those that it starts, the lowest real-time priority, which is above all that have none.

    Raises:
        BadSetting: this system has no such thing, or does not allow it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError) as error:
        raise BadSetting(
            f"--realtime is not possible here: {error}.", hint="It needs Linux, and root or CAP_SYS_NICE."
        ) from error
