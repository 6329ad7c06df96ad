"""A redis-server of one test on a Unix socket: to be killed, damaged and started again, with a full disk, or with a
clock that steps."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from services.queue.acl import RULES, permissions, user_line
from services.queue.keys import Keys
from testkit.native import compiled

APPEND_ONLY = ("--appendonly", "yes", "--appendfsync", "always")
NAMESPACE = "test"
"""Where the users may be."""
EACH_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")
"""As the chart has it: a server that cannot write refuses writes. With "always" it would end."""
LOADS = "-loads"
"""After a role's name: its user, who may load scripts, too. A test then needs no scheduler for that."""

_CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *ahead; /* seconds */
__attribute__((constructor)) static void begin(void) {
  char *file = getenv("CLOCK_AHEAD");
  void *seen = file ? mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, open(file, O_RDONLY), 0) : MAP_FAILED;
  if (seen != MAP_FAILED) ahead = seen;
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int failed = syscall(SYS_clock_gettime, id, t);
  if (!failed && ahead && id == CLOCK_REALTIME) t->tv_sec += *ahead;
  return failed;
}
int gettimeofday(struct timeval *t, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""
"""Preloaded into a server: what it takes for the time of day is so far ahead. Lifetimes and ids of streams follow."""


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
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, password: str | None = None) -> None:
        """Start, or start again from the append-only file; returns when it answers."""
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | self._environment,
            restore_signals=False,  # SIGXFSZ stays ignored: a file over its limit is an error of write()
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
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

    def fill_disk(self) -> None:
        """From here on the append-only file grows no more."""
        self._limit_files(max(file.stat().st_size for file in Path(self._folder).rglob("*.aof")))

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def with_clock(self) -> RedisServer:
        """This server, with a clock of its own once it is started, which :meth:`set_clock` moves.

        Raises:
            Absent: there is no C compiler.
        """
        library = compiled("steps.so", _CLOCK)
        self._environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": f"{self._folder}/ahead"}
        self.set_clock(0)
        return self

    def set_clock(self, ahead_s: int) -> None:
        """It is that many seconds ahead of the machine's clock from now on."""
        file = Path(self._folder, "ahead")
        with file.open("r+b" if file.exists() else "wb") as stream:
            stream.write(ahead_s.to_bytes(8, "little", signed=True))

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
