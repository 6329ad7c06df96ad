"""A server that `expertmesh serve` runs on this machine: its processes, by their names in its log.

Each process has its name in that of its configuration file, which is in the private folder of its supervisor.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from loadgen.events.host import EventImpossible, run_command
from loadgen.events.plan import Planned
from services.runtime.local_servers import folders_of

REDIS = "redis"
"""Name of the private Redis, which has no file; its folder is called the same."""
_PROCESSES = Path("/proc")


class LocalHost:
    """This machine, with the server at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def find(self, event: Planned) -> str:
        if event.action == "run":
            return event.target
        if event.action == "scale":
            raise EventImpossible(
                f"{event.target} cannot be scaled: the processes of `expertmesh serve` are fixed.",
                hint="Give --release, or let AT:run:COMMAND start or stop a worker.",
            )
        return f"process {await self._pid(event.target)}"

    async def act(self, event: Planned) -> str:
        if event.action == "run":
            return await run_command(event.target, shell=True)
        if event.action == "scale":
            return await self.find(event)
        pid = await self._pid(event.target)
        try:
            await signal_process(pid, event)
        except ProcessLookupError as error:
            raise EventImpossible(f"{event.target} ended by itself, as process {pid}.") from error
        return f"process {pid}"

    async def _pid(self, name: str) -> int:
        found = dict(await asyncio.to_thread(lambda: list(self._processes())))
        if name in found:
            return found[name]
        there = ", ".join(sorted(found))
        raise EventImpossible(
            f"There is no process {name} of a server at {self._url} on this machine.",
            hint=f"There are {there}." if found else "For a release on Kubernetes give --release.",
        )

    def _processes(self) -> Iterator[tuple[str, int]]:
        """Yields name and number of each process of the server."""
        folders = folders_of(self._url)
        for entry in _PROCESSES.iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # it has ended, or is another user's
                    yield from ((name, int(entry.name)) for name in _names(entry, folders))


def _names(process: Path, folders: list[Path]) -> Iterator[str]:
    words = [Path(os.fsdecode(word)) for word in (process / "cmdline").read_bytes().split(b"\0")]
    yield from (word.stem for word in words if word.suffix == ".yaml" and word.parent in folders)
    if words and Path(os.readlink(process / "cwd")) in [folder / REDIS for folder in folders]:
        yield REDIS


async def signal_process(pid: int, event: Planned) -> None:
    """Kills, drains or pauses a process, as ``event`` says. Returns when a pause is over.

    Raises:
        ProcessLookupError: it has ended.
    """
    if event.action != "pause":
        os.kill(pid, signal.SIGKILL if event.action == "kill" else signal.SIGTERM)
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(event.for_s)
    finally:
        os.kill(pid, signal.SIGCONT)
