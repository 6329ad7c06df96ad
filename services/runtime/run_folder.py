"""Folders of temporary files that belong to one process: no other user can enter them, and none outlives it for long.

A supervisor hands its children their configuration in such a folder, and leaves a record there by which other commands
of the same user find it (:mod:`services.runtime.local_servers`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from services.config import Settings

_PREFIX = "expertmesh-serve-"
_MAX_PARENT_BYTES = 32
"""The longest usable path of temporary files; it leaves room for
expertmesh-serve-<place>-<pid>.<ticks>-<random>/redis/redis.sock."""


def private_folder(prefix: str) -> Path:
    """Make a fresh folder that only this user can enter, its path short enough for sockets in it or a folder below."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_parent()))


class RunFolder:
    """A folder that only this user can enter, named after the process that owns it, where that runs and since when."""

    def __init__(self) -> None:
        _remove_left_behind()
        self.path = private_folder(f"{_prefix()}{_life(os.getpid())}-")

    def write(self, name: str, settings: Settings, changes: Mapping[str, object]) -> Path:
        """Write ``settings`` with ``changes`` for the process ``name`` and return the file."""
        values = settings.model_dump(mode="json") | dict(changes)
        if settings.redis_url_file is not None:  # the process reads the file itself, at each start
            values["redis_url"] = None
        return self.keep(f"{name}.yaml", yaml.safe_dump(values, allow_unicode=True))

    def new_secret(self, name: str) -> Path:
        """Return a new file with fresh random text."""
        return self.keep(f"{name}.secret", secrets.token_urlsafe(32))

    def keep(self, name: str, content: str) -> Path:
        """Create a file that only its owner can read."""
        file = self.path / name
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(content)
        return file

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def live_folders() -> Iterator[Path]:
    """Yield the folders of this user's running supervisors that no other user can have written to."""
    for folder, mode, owner in _folders():
        if not _ended(owner) and not mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield folder


def _remove_left_behind() -> None:
    """Delete folders of this user's supervisors that were killed, even of one with the same process number."""
    for folder, _, owner in _folders():
        if _ended(owner):
            shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Iterator[tuple[Path, int, str]]:
    """Yield this user's folders with their mode and the life of the process that made them, if its number is one here:
    other hosts and containers may have the same folder of temporary files."""
    prefix = _prefix()
    for folder in sorted(_parent().glob(f"{prefix}*")):
        with suppress(OSError):
            found = folder.lstat()
            if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode):
                yield folder, found.st_mode, folder.name.removeprefix(prefix).split("-")[0]


def _parent() -> Path:
    parent = tempfile.gettempdir()
    too_long = len(os.fsencode(parent)) > _MAX_PARENT_BYTES and os.access("/tmp", os.W_OK)
    return Path("/tmp" if too_long else parent)


def _prefix() -> str:
    """Return the start of the names of folders whose owners' process numbers mean the same as here: on Linux by boot
    and PID namespace, elsewhere by host."""
    place = platform.node()
    with suppress(OSError):
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/proc/self/ns/pid').st_ino}"
    return f"{_PREFIX}{hashlib.sha256(place.encode()).hexdigest()[:8]}-"


def _life(pid: int) -> str:
    """Return the process's number, on Linux followed by its start time in ticks since the machine started."""
    with suppress(OSError):
        return f"{pid}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return str(pid)


def _ended(owner: str) -> bool:
    pid, _, began = owner.partition(".")
    if not pid.isdigit():
        return False
    return not _alive(int(pid)) or (began != "" and owner != _life(int(pid)))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
