"""Hands to a supervisor's children what they need: a private folder with a configuration file for each, and ports."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from services.config import Settings
from services.errors import ConfigError, PortInUse
from services.queue.embedded import private_folder

_PREFIX = "expertmesh-serve-"


class RunFolder:
    """A folder that only this user can enter, named after the process that owns it and when that began."""

    def __init__(self) -> None:
        self.path = private_folder(f"{_PREFIX}{_life(os.getpid())}-")
        self._sweep(self.path.parent)

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

    @staticmethod
    def _sweep(parent: Path) -> None:
        """Delete folders of this user's supervisors that were killed, even of one with the same process number."""
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).split("-")[0]
            with suppress(OSError):
                if folder.stat().st_uid == os.getuid() and _ended(owner):
                    shutil.rmtree(folder, ignore_errors=True)


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


def check_port(host: str, port: int, *, option: str = "--port") -> int:
    """Return ``port`` if nobody listens there on ``host``; a free one for 0. ``option`` is the one that chose the port.

    Raises:
        PortInUse: another process listens there.
        ConfigError: the address is not one of this machine, or not allowed.
    """
    try:
        with _listen(host, port) as probe:
            return _port_of(probe)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is in use by another process.",
                hint=f"Choose another with {option} N (0 picks a free one), or stop that process.",
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"Port {port} needs privileges.", hint=f"Choose one above 1023 with {option} N."
            ) from error
        raise ConfigError(f"Cannot listen on --host {host} ({error.strerror}).", hint="Try 127.0.0.1.") from error


def held_ports(host: str, count: int, until: ExitStack) -> list[int]:
    """Return ``count`` different ports for children to listen on.

    Linux gives them to no other process until ``until`` is closed: a port that is only bound goes to those who name it.
    """
    with ExitStack() as bound:  # all at once, else the kernel might offer one twice
        ports = [_port_of(bound.enter_context(_bind(host, 0))) for _ in range(count)]
        if sys.platform == "linux":
            until.push(bound.pop_all())
        return ports


def held(host: str, ports: Sequence[int], until: ExitStack, *, option: str) -> Sequence[int]:
    """Return ``ports``, held as by :func:`held_ports`: a child's port stays its own between death and next start.

    Raises:
        PortInUse: another process has one of them.
    """
    for port in ports:
        check_port(host, port, option=option)
    with ExitStack() as bound:
        for port in ports:
            bound.enter_context(_bind(host, port))
        if sys.platform == "linux":
            until.push(bound.pop_all())
    return ports


def _listen(host: str, port: int) -> socket.socket:
    probe = _bind(host, port)
    try:
        probe.listen()
    except OSError:
        probe.close()
        raise
    return probe


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    except OSError:
        probe.close()
        raise
    return probe


def _port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port


def base_url(host: str, port: int) -> str:
    """Return the URL at which a client on this machine reaches a server that listens on ``host``."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
