"""Runs a process from ``argv`` to its exit code, as `python -m services.<role>` and `expertmesh <role>` both do."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import disable_created_metrics

from services.config import Role, Settings, load_settings
from services.errors import StartupError
from services.runtime.daemon import left_behind
from services.runtime.logs import configure_logging
from services.runtime.parent import watch_parent

ProcessMain = Callable[[asyncio.Event], Coroutine[Any, Any, int | None]]
RoleMain = Callable[[Settings, asyncio.Event], Coroutine[Any, Any, None]]
"""Runs a role until the event is set, then drains and returns."""

CRASHED = 70
"""Exit code of a role that failed unexpectedly (sysexits' EX_SOFTWARE). A supervisor restarts it; a start-up error
(codes 1 to 5, see ``services.errors``) would only repeat."""
AGAIN = 75
"""Exit code of a role that another process keeps from going on (sysexits' EX_TEMPFAIL): start it again."""
FORCED = 130
"""Exit code after a second Ctrl-C."""

log = logging.getLogger(__name__)


def run_role(
    role: Role,
    main: RoleMain,
    argv: Sequence[str] | None = None,
    *,
    prepare: Callable[[Settings], Settings] = lambda settings: settings,
) -> int:
    """Run ``main(settings, stop)`` with settings from ``argv`` and the environment; return the exit code.

    ``prepare`` completes the settings before anything runs, and may take long: Ctrl-C ends it at once.
    See :func:`run_process` for signals and errors. A :class:`StartupError` in the settings is one line on stderr.
    Where the role has left work behind, the process ends here.
    """
    try:
        settings = load_settings(argv, role=role)
    except StartupError as error:
        print(f"expertmesh {role}: {error.message}", file=sys.stderr, flush=True)
        return error.exit_code
    configure_logging(settings.process or role, settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as many series again, of when each counter began
    if settings.supervisor_pid is not None:
        watch_parent(settings.supervisor_pid)
    try:
        prepared = prepare(settings)
    except StartupError as error:
        log.error("%s", error.message)
        return error.exit_code
    code = run_process(lambda stop: main(prepared, stop))
    if left_behind():
        os._exit(code)
    return code


def run_process(main: ProcessMain, *, force: Callable[[], None] | None = None) -> int:
    """Run ``main(stop)`` to its end and return its exit code (0 for None).

    The first SIGINT or SIGTERM sets ``stop``; the second calls ``force``, and without one ends the process at once.
    A :class:`StartupError` is logged as one line and becomes its exit code; any other exception is logged with its
    traceback and becomes ``CRASHED``.
    """
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_until_stopped(main, force)) or 0
    except Exception as error:
        known = _startup_error(error)
        if known is None:
            log.exception("crashed")
            return CRASHED
        log.error("%s", known.message)
        return known.exit_code


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop where there is one: roles share cores with the engine, and uvloop halves a Redis round trip."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # has no build for Windows

    return uvloop.new_event_loop()


def _startup_error(error: BaseException) -> StartupError | None:
    """Return ``error``, or the one inside a task group's exception group, if it is a start-up error."""
    if isinstance(error, StartupError):
        return error
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for found in map(_startup_error, inside) if found), None)


async def _until_stopped(main: ProcessMain, force: Callable[[], None] | None) -> int | None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            log.debug("stopping on %s", signal.Signals(number).name)
            stop.set()
        elif len(received) == 2 and force:
            force()
        else:
            os._exit(FORCED)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return await main(stop)
