"""Where a server's processes are, and what can be done to them. A :class:`Host` is this machine or a cluster."""

from __future__ import annotations

import asyncio
from typing import Protocol

from loadgen.errors import LoadError
from loadgen.events.plan import Planned


class EventImpossible(LoadError):
    """There is no such process or pod, or it cannot be reached."""

    code = "event_impossible"


class Host(Protocol):
    """One deployment."""

    async def find(self, event: Planned) -> str:
        """Returns what the event would be done to, in words.

        Raises:
            EventImpossible: there is no such target, or that cannot be done to it here.
        """
        ...

    async def act(self, event: Planned) -> str:
        """Does it, and returns to what, in words.

        Raises:
            EventImpossible: it could not be done.
        """
        ...


async def run_command(*words: str, shell: bool = False) -> str:
    """Returns what a command printed, without spaces around it. ``shell``: the one word is a line for the shell.

    Raises:
        EventImpossible: it ended with an error, or there is no such program; the message has its last line.
    """
    started = ("/bin/sh", "-c", *words) if shell else words
    none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*started, stdin=none, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise EventImpossible(f"{words[0]} cannot be started: {error.strerror}.") from error
    try:
        said, complained = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        last = (complained or said).decode(errors="replace").strip().splitlines()[-1:]
        raise EventImpossible(f"`{' '.join(words)}` ended with {process.returncode}: {' '.join(last) or 'no output'}")
    return said.decode(errors="replace").strip()
