"""Ports for a supervisor's children to listen on, and the URL of what listens there."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from services.errors import ConfigError, PortInUse


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
