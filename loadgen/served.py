"""``expertmesh serve`` as a child process, for what measures it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx

START_S, END_S = 120.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server that is ready. ``pid``: the process above all others."""

    url: str
    pid: int


@contextmanager
def served(options: Sequence[str], *, port: int, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Serves while the context is open. ``env`` adds to this process's environment.

    Raises:
        SystemExit: the server ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "services", "serve", *options, "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | (env or {}))
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url)
        yield Served(url=url, pid=process.pid)
    finally:
        process.terminate()
        process.wait(END_S)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_S
    while not _ready(url):
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        if time.monotonic() > until:
            sys.exit(f"the server was not ready within {START_S:g} s")
        time.sleep(0.1)


def _ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    return False
