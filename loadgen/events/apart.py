"""Events in a process of their own: the process that sends has nothing to do but to send."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType

from loadgen.events.follow import Following
from loadgen.events.host import Host
from loadgen.events.plan import Planned
from loadgen.results import Event


class Apart:
    """A context in which events happen to ``host`` once :meth:`begin` was called. After its end, which breaks off what
    is under way, ``events`` has what came of them."""

    def __init__(self, events: Sequence[Planned], host: Host) -> None:
        self._planned, self._host = list(events), host
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self.events: list[Event] = []

    def __enter__(self) -> Apart:
        if self._planned:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_child, args=(self._planned, self._host, theirs), daemon=True)
            self._process.start()
            theirs.close()
            self._pipe.recv()  # it is ready
        return self

    def begin(self, began_at: float) -> None:
        """Let the time of events begin at ``began_at``, in Unix seconds."""
        if self._pipe is not None:
            self._pipe.send(began_at)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._pipe is None:
            return
        found: Exception | list[Event] = []
        with suppress(*(() if kind is None else (EOFError, OSError))):  # interrupted, as the load was
            self._pipe.send(None)
            found = self._pipe.recv()
        self._process.join()
        if isinstance(found, Exception):
            raise found
        self.events = found


def _child(events: Sequence[Planned], host: Host, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that sends has it, too, and ends this one
    try:
        pipe.send(None)
        pipe.send(asyncio.run(_follow(events, host, pipe)))
    except EOFError:  # the one that sends has died
        return
    except Exception as error:  # noqa: BLE001 -- the parent raises it
        pipe.send(error)


async def _follow(events: Sequence[Planned], host: Host, pipe: Connection) -> list[Event]:
    began_at = await asyncio.to_thread(pipe.recv)
    if began_at is None:  # the load ended before it began
        return Following(events, host, 0.0).events
    async with Following(events, host, time.perf_counter() + began_at - time.time()) as following:
        await asyncio.to_thread(pipe.recv)
    return following.events
