"""A server as a child process, for what measures it: ``expertmesh serve``, or that of others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx

from loadgen.errors import AddressTaken, ServerEnded
from services.runtime import die_with_parent

START_S, END_S = 120.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server that is ready. ``pid``: the process above all others."""

    url: str
    pid: int


@contextmanager
def served(options: Sequence[str], *, port: int, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Serves with ``expertmesh serve`` while the context is open. ``env`` adds to this process's environment.

    Raises:
        ServerEnded: the server ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "expertmesh", "serve", *options, "--port", str(port)]
    with started(command, url=f"http://127.0.0.1:{port}", ready="/ready", start_s=START_S, env=env) as server:
        yield server


@contextmanager
def started(
    command: Sequence[str], *, url: str, ready: str, start_s: float, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Runs ``command``, a server at ``url``, while the context is open. It has ``start_s`` seconds until a GET of the
    path ``ready`` is answered with 200. ``env`` adds to this process's environment.
    Ctrl-C is not the server's, which ends with the context or with this process. What it prints goes to stderr.

    Raises:
        AddressTaken: something else answers there.
        ServerEnded: the server ended, or was not ready in time.
    """
    _refuse_other(url)
    process = subprocess.Popen(
        command,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    try:
        _wait_ready(process, url + ready, start_s)
        yield Served(url=url, pid=process.pid)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _refuse_other(url: str) -> None:
    """Raises AddressTaken: whatever answers at ``url`` now is not the server that is to be started."""
    at = httpx.URL(url)
    with suppress(OSError), socket.create_connection((at.host, at.port or 80), timeout=2):
        raise AddressTaken(
            f"Something answers at {url} already, which would be measured instead of the server that is started.",
            hint="Choose another port, or end what runs there.",
        )


def _wait_ready(process: subprocess.Popen[bytes], url: str, start_s: float) -> None:
    until = time.monotonic() + start_s
    while not _ready(url):
        if process.poll() is not None:
            raise ServerEnded(f"The server ended with {process.returncode}.", hint="Its output says why.")
        if time.monotonic() > until:
            raise ServerEnded(f"The server was not ready within {start_s:g} s.")
        time.sleep(0.1)


def _ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False
