"""A process under the limits that its container would have: memory, of which the kernel kills it, and descriptors.

A cgroup where the machine allows one: it counts socket buffers too, and its OOM kill is the real one. Elsewhere
RLIMIT_DATA, under which an allocation fails; a run says which it was. Another cgroup gives all processes of a
deployment precedence on the CPU, as a reservation does: what else this machine has to do must not be what is measured.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MIB = 1 << 20
_ROOT = Path("/sys/fs/cgroup")


@dataclass(kw_only=True, slots=True)
class Group:
    """``folder`` is the cgroup, None where the machine allows none; ``how`` says it for a report."""

    how: str
    folder: Path | None = None

    def command(self, args: Sequence[str]) -> list[str]:
        """``args`` inside; the process keeps its pid."""
        return ["/bin/sh", "-c", " && ".join([*self._entering(), 'exec "$@"']), "sh", *args]

    def _entering(self) -> list[str]:
        """What a shell does first."""
        return [] if self.folder is None else [f"echo $$ > {shlex.quote(str(self.folder / 'cgroup.procs'))}"]

    def close(self) -> None:
        """Once all of its processes have ended."""
        end = time.monotonic() + 5
        while self.folder is not None and self.folder.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.05)


@dataclass(kw_only=True, slots=True)
class Cage(Group):
    """Without a cgroup RLIMIT_DATA has to do."""

    limit: int
    version: int = 0
    nofile: int | None = None

    def _entering(self) -> list[str]:
        files = [f"ulimit -n {self.nofile}"] if self.nofile else []
        return (Group._entering(self) or [f"ulimit -d {self.limit // 1024}"]) + files

    def usage(self) -> int | None:
        """Bytes now, the page cache of its files included."""
        return self._number({1: "memory.usage_in_bytes", 2: "memory.current"})

    def sockets(self) -> int | None:
        """Of these, bytes in socket buffers; v1 counts them separately."""
        return self._number({1: "memory.kmem.tcp.usage_in_bytes"})

    def peak(self) -> int | None:
        return self._number({1: "memory.max_usage_in_bytes", 2: "memory.peak"})

    def reset_peak(self) -> None:
        if self.folder is not None:
            name = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}[self.version]
            with contextlib.suppress(OSError):  # v2 before Linux 6.12 cannot
                (self.folder / name).write_text("0")

    def kills(self) -> int:
        """How often the kernel killed here for want of memory."""
        if self.folder is None:
            return 0
        name = {1: "memory.oom_control", 2: "memory.events"}[self.version]
        lines = (self.folder / name).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _number(self, names: dict[int, str]) -> int | None:
        if self.folder is None or self.version not in names:
            return None
        try:
            return int((self.folder / names[self.version]).read_text())
        except (OSError, ValueError):
            return None


def precedence() -> Group:
    """On the CPU, before all that is not in it; where the machine allows none, one that changes nothing and says so."""
    refusals: list[str] = []
    for file, most in (("cpu.shares", "65536"), ("cpu.weight", "10000")):
        for parent in (_ROOT / "cpu", _ROOT):
            known = (parent / "cgroup.procs").exists()
            if known and (folder := _made(parent, "cpu", partial(_weighed, file=file, weight=most), refusals)):
                return Group(how=f"{file} {most}", folder=folder)
    return Group(how=f"none ({'; '.join(refusals) or 'no cpu controller'})")


def cage(name: str, limit: int, *, nofile: int | None = None) -> Cage:
    """A fresh one for one process."""
    refusals: list[str] = []
    for version, parent in _parents():
        if folder := _made(parent, name, partial(_bound, version=version, limit=limit), refusals):
            how = f"cgroup v{version}, {limit // MIB} MiB"
            return Cage(limit=limit, how=how, folder=folder, version=version, nofile=nofile)
    why = "; ".join(refusals) or "no memory controller"
    return Cage(limit=limit, how=f"RLIMIT_DATA, {limit // MIB} MiB (no cgroup: {why})", nofile=nofile)


def _made(parent: Path, name: str, bound: Callable[[Path], object], refusals: list[str]) -> Path | None:
    """A new cgroup that is ``bound``; None where that is refused."""
    folder = parent / f"expertmesh-abuse-{os.getpid()}-{name}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        bound(folder)
    except OSError as error:
        refusals.append(f"{parent}: {error.strerror}")
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder


def _weighed(folder: Path, file: str, weight: str) -> None:
    (folder / file).write_text(weight)


def _bound(folder: Path, version: int, limit: int) -> None:
    if version == 2:
        (folder / "memory.max").write_text(str(limit))
        for name, value in (("memory.swap.max", "0"), ("cpu.weight", "10000")):
            with contextlib.suppress(OSError):  # a process is in one group of v2: this one is the precedence's, too
                (folder / name).write_text(value)
        return
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    with contextlib.suppress(OSError):  # from the first limit on they are counted
        (folder / "memory.kmem.tcp.limit_in_bytes").write_text(str(limit))


def _parents() -> Iterator[tuple[int, Path]]:
    """Where a cgroup may be made: below our own, else at the top."""
    own = dict(_memberships())
    for mount in (_ROOT / "memory", _ROOT):
        if "memory" in own and (mount / "memory.limit_in_bytes").exists():
            yield 1, mount / own["memory"]
            yield 1, mount
    for place in (_ROOT / own.get("", ""), _ROOT):
        with contextlib.suppress(OSError):
            if "memory" in (place / "cgroup.subtree_control").read_text().split():
                yield 2, place


def rss_mib(pid: int) -> float:
    """Resident memory of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def descriptors(pid: int) -> int:
    """How many a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _memberships() -> Iterator[tuple[str, str]]:
    """(controller, path) of this process; v2 has the empty name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                yield controller, path.lstrip("/")
