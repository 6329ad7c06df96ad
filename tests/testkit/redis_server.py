"""A redis-server of one test: append-only on disk, on a Unix socket, to be killed and started again."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from services.queue.embedded import find_redis_server


class RedisServer:
    """Starts at once. Its socket lies in a short path: sockaddr_un has no room for pytest's folders."""

    def __init__(self, *, fsync: str = "always") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._fsync = fsync
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def _socket(self) -> Path:
        return self._folder / "redis.sock"

    def start(self) -> None:
        """Start, or start again from the append-only file."""
        command = [find_redis_server(), "--port", "0", "--unixsocket", self._socket, "--dir", self._folder]
        options = ["--appendonly", "yes", "--appendfsync", self._fsync, "--save", "", "--loglevel", "warning"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=str(self._socket))
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not come up"
                time.sleep(0.01)
        client.close()

    def kill(self) -> None:
        """Kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
