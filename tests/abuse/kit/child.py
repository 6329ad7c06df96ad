"""A helper process that is asked by lines of JSON on its stdin and answers on its stdout."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testkit.processes.servers import in_main_thread

from services.runtime import die_with_parent

TESTS = Path(__file__).parents[2]
TICK_S = 0.02
MAX_FILES = 12_000


def share_paths() -> None:
    """Lets child processes import what this one does: the repository and its tests."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    wanted = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "examples/pocket-moe")]
    os.environ["PYTHONPATH"] = os.pathsep.join([path for path in wanted if path not in known] + [p for p in known if p])


def raise_descriptors() -> None:
    """As many as this process may have, for it and its children; says so where those are too few for all attacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    if wanted < MAX_FILES:
        print(f"{wanted} descriptors are the most here (ulimit -Hn), so fewer connections are opened", flush=True)


class Child:
    """``python -m module`` with ``config`` as its one argument, by way of ``within``. Its errors go to ``log``."""

    def __init__(
        self,
        module: str,
        config: Mapping[str, Any],
        log: Path,
        within: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        share_paths()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                within([sys.executable, "-m", module, json.dumps(config)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent() if in_main_thread() else None,
            )
        self._log = log
        self._turn = threading.Lock()

    def ask(self, what: str, **arguments: Any) -> Any:
        """Its answer to ``what``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            self._process.stdin.write(json.dumps([what, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, f"a helper ended:\n{self._log.read_text()[-3000:]}"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def obey(handlers: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Answers on this process's stdin and stdout until that is closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        what, arguments = json.loads(line)
        print(json.dumps(await handlers[what](**arguments)), flush=True)


class OwnLag:
    """How long this process's own event loop stood still: what it measures then says nothing of others."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # since, until

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            if (now := time.monotonic()) - before > 4 * TICK_S:
                self._late.append((before + TICK_S, now))

    def within(self, since: float, until: float) -> float:
        """Seconds of it."""
        found = 0.0
        for begin, end in reversed(self._late):
            if end < since:
                break
            found += max(0.0, min(until, end) - max(since, begin))
        return found
