"""One supervised process: started in a session of its own, restarted by its policy, stopped on request."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from services.config import ENV_PREFIX
from services.queue.embedded import EmbeddedRedis
from services.runtime import AGAIN, CRASHED, die_with_parent
from services.supervisor.policy import RestartPolicy

log = logging.getLogger(__name__)


class Running(Protocol):
    """A process as the supervisor sees it. ``start`` may be called again after it ended; ``pid`` is None between."""

    @property
    def pid(self) -> int | None: ...

    async def start(self) -> object: ...

    async def wait(self) -> int: ...

    async def stop(self, timeout_s: float) -> int | None:
        """Return the exit code, as :meth:`wait` does; None if the process had ended before, or has none."""

    def kill(self) -> None: ...


class RoleProcess:
    """A role as a child process. A session of its own keeps the terminal's Ctrl-C away; it never outlives its parent.
    ``name`` is for the log; ``on_end`` is called with the process's number once it has ended."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name, self._command = name, command
        self._on_end = on_end
        self._environment = {key: value for key, value in environment.items() if not key.upper().startswith(ENV_PREFIX)}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the process. Its output goes where this process's output goes."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    async def wait(self) -> int:
        """Return the exit code once the process ends, or minus the number of the signal that ended it."""
        assert self._process is not None, "not started"
        code = await self._process.wait()
        self._on_end(self._process.pid)
        return code

    async def stop(self, timeout_s: float) -> int | None:
        """Ask the process to stop, and kill it if it has not ended after ``timeout_s`` seconds."""
        if self._process is None or self.pid is None:
            return None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s did not stop in %.0f s; killing it", self._name, timeout_s)
            self.kill()
            await self._process.wait()
        return self._process.returncode

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self.pid is not None:
            self._process.kill()


class RedisProcess(EmbeddedRedis):
    """The embedded Redis as a supervised process. It has a bound of its own on the time that stopping takes."""

    async def stop(self, timeout_s: float = 0.0) -> None:
        del timeout_s
        await super().stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """A supervisor's knowledge of a child.

    ``spared``: others go on meanwhile, so the child is not given up for failing too often. ``proven``: its settings
    have worked before, so it is not given up for an exit code of a start-up error. ``lived_s``: seconds for which it
    has been well in this life; None: since its start. ``on_start`` is called at each start, ``on_end`` with a process's
    number at its end.
    """

    spared: Callable[[], bool] = lambda: False
    proven: Callable[[], bool] = lambda: False
    lived_s: Callable[[], float] | None = None
    on_start: Callable[[], None] = lambda: None
    on_end: Callable[[int], None] = lambda _: None


class Child:
    """A process and its restart policy. ``keep_alive`` restarts it until it is stopped or given up."""

    def __init__(
        self,
        name: str,
        process: Running,
        policy: RestartPolicy,
        *,
        outlook: Outlook | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self._process = process
        self._policy = policy
        self._outlook = outlook or Outlook()
        self._began = 0.0
        self._sleep = sleep
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

    @property
    def well(self) -> bool:
        """Whether the process did not fail too often of late."""
        return not self._policy.exhausted or self._lived_s() >= self._policy.healthy_s

    async def start(self) -> None:
        """Start the process."""
        self._began = time.monotonic()
        self._outlook.on_start()
        await self._process.start()

    async def keep_alive(self) -> int:
        """Restart the process whenever it ends. Returns the exit code (1 to 255) after which it is given up."""
        while True:
            code = await self._process.wait()
            if self._stopping:
                return 0
            outlook = self._outlook
            delay = self._policy.delay(code, self._lived_s(), spared=outlook.spared(), proven=outlook.proven())
            if delay is None:
                return _exit_code(code)
            log.warning("%s %s; restarting it in %.2g s", self.name, _describe(code), delay)
            if self._policy.exhausted:
                log.error("%s keeps failing; retrying indefinitely, because others do its work meanwhile", self.name)
            await self._sleep(delay)
            await self.start()

    def restart(self) -> None:
        """Kill the process, so that :meth:`keep_alive` starts it again."""
        self._process.kill()

    def _lived_s(self) -> float:
        lived_s = self._outlook.lived_s
        return lived_s() if lived_s else time.monotonic() - self._began

    async def stop(self, timeout_s: float) -> None:
        """Stop the process for good."""
        self._stopping = True
        code = await self._process.stop(timeout_s)
        if code is not None and not _as_asked(code):
            log.warning("%s was asked to stop, but %s", self.name, _describe(code))

    def kill(self) -> None:
        """End the process at once, for good."""
        self._stopping = True
        self._process.kill()


def _as_asked(code: int) -> bool:
    """Return whether a child that was stopped ended in order. A rank in lock-step may leave with another rank (AGAIN);
    a process that has just begun does not handle SIGTERM yet; a kill after the timeout has been logged."""
    return code in (0, AGAIN, -signal.SIGTERM, -signal.SIGKILL)


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _exit_code(code: int) -> int:
    """Return the exit code as a shell reports it. A process that ends with 0 although nobody stopped it has crashed."""
    return 128 - code if code < 0 else code or CRASHED
