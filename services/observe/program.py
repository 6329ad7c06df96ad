"""A program of others that runs beside this process, and ends with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from services.errors import StartupError
from services.runtime import die_with_parent

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_LAST_LINES = 5


class Program:
    """``command`` runs with its output in ``log``. It is well once ``ready_url`` answers 200."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, ready_url: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._ready_url = ready_url
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the program and wait until it is well.

        Raises:
            StartupError: it ends, or is not well in time; the message has what it said last.
        """
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_well()
        except TimeoutError as error:
            await self.stop()
            raise StartupError(f"{self.name} did not get ready:", hint=self._last_words()) from error

    async def ended(self) -> None:
        """Wait for its end, which is a fault.

        Raises:
            StartupError: it has ended.
        """
        assert self._process is not None, "not started"
        code = await self._process.wait()
        raise StartupError(f"{self.name} ended with exit code {code}:", hint=self._last_words())

    async def stop(self) -> None:
        """End the program, by SIGTERM and then by SIGKILL."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the program at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _until_well(self) -> None:
        assert self._process is not None, "not started"
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                if self._process.returncode is not None:
                    await self.ended()
                with suppress(httpx.HTTPError):
                    if (await client.get(self._ready_url)).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return " | ".join(lines) or "It said nothing."
