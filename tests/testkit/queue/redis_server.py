"""A redis-server of one test on a Unix socket, to be killed, damaged and started again."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from services.queue.acl import RULES, permissions, user_line
from services.queue.keys import Keys

APPEND_ONLY = ("--appendonly", "yes", "--appendfsync", "always")
NAMESPACE = "test"
"""Where the users may be."""
LOADS = "-loads"
"""After a role's name: its user, who may load scripts, too. A test then needs no scheduler for that."""


def version_of(binary: str) -> tuple[int, int]:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def write_users(folder: Path, binary: str) -> Path:
    """An ACL file with a user for each role, its name as password, next to the default user without one."""
    lines, version = ["user default on nopass ~* &* +@all"], version_of(binary)
    for role in RULES:
        rule = permissions(role, Keys(NAMESPACE), version)
        lines += [user_line(role, rule, role), user_line(role + LOADS, f"{rule} +script|load", role + LOADS)]
    file = folder / "users.acl"
    file.write_text("\n".join(lines) + "\n")
    return file


class RedisServer:
    """``binary`` with ``options``, not started yet. Its socket has a short path: sockaddr_un has no room for more."""

    def __init__(self, binary: str, *options: str) -> None:
        self.binary = binary
        self._folder = tempfile.mkdtemp(prefix="emq")
        self.socket = f"{self._folder}/s"
        self.url = f"unix://{self.socket}"
        place: tuple[str, ...] = ("--port", "0", "--unixsocket", self.socket, "--dir", self._folder)
        if "--requirepass" not in options:
            place += ("--aclfile", str(write_users(Path(self._folder), binary)))
        self._command = [binary, *place, "--save", "", "--loglevel", "warning", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, password: str | None = None) -> None:
        """Start, or start again from the append-only file; returns when it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        with redis.Redis(unix_socket_path=self.socket, password=password) as probe:
            while not _answers(probe):
                assert time.monotonic() < deadline, f"{self.binary} does not come up"
                time.sleep(0.01)

    def kill(self) -> None:
        """Kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        Path(self.socket).unlink(missing_ok=True)

    def tear(self, size: int) -> None:
        """Cuts ``size`` bytes off the append-only file, as a crash of the machine may."""
        (file,) = [file for file in Path(self._folder).rglob("*.aof") if ".base." not in file.name]
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - size)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


@contextlib.contextmanager
def running_redis(binary: str, *options: str) -> Iterator[RedisServer]:
    """A :class:`RedisServer` that answers, for the length of the block."""
    server = RedisServer(binary, *options)
    try:
        server.start()
        yield server
    finally:
        server.close()
