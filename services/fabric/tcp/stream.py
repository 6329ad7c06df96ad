"""A socket, plain or TLS, that one thread reads while another writes, and on which every wait has a deadline."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import TypeVar

from services.errors import PortInUse, SeatLost

T = TypeVar("T")

_BUFFERS_PER_SEND = 64
_RECHECK_S = 1.0
"""TLS may need to read in order to write, and the thread that reads may take those bytes: waits look again so often."""
_DRAIN_BYTES = 1 << 16
_BACKLOG = 128


class Stream:
    """Sends and receives bytes over ``sock``, which it owns.

    Args:
        silence_s: longest wait for the peer to send, or to take, the next byte.
        name: name of the peer, for errors.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float, name: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self.silence_s = silence_s
        self.name = name
        self._tls = isinstance(sock, ssl.SSLSocket)
        # OpenSSL allows no reading while another thread writes. Neither blocks, so that the lock is free at once.
        self._turn: AbstractContextManager[object] = Lock() if self._tls else nullcontext()

    def recv_into(self, view: memoryview, until: float | None = None) -> None:
        """Fill ``view`` by ``until``, a time of the monotonic clock; without one each byte must come in ``silence_s``.

        Raises:
            SeatLost: the connection ended, broke or fell silent.
        """
        while len(view):
            count = self._attempt(partial(self._sock.recv_into, view), select.POLLIN, until)
            if count == 0:
                raise SeatLost(f"{self.name} closed the connection.")
            view = view[count:]

    def send(self, parts: Sequence[memoryview], until: float | None = None, *, no_timeout: bool = False) -> None:
        """Send ``parts`` one after the other without joining them.

        Args:
            no_timeout: wait as long as the connection lives, because the peer may stop reading on purpose.

        Raises:
            SeatLost: as in :meth:`recv_into`.
        """
        until = float("inf") if no_timeout else until
        left = [part for part in parts if len(part)]
        while left:
            count = self._attempt(partial(self._send_some, left), select.POLLOUT, until)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    @property
    def local_host(self) -> str:
        """Address of this end."""
        return str(self._sock.getsockname()[0])

    def broken(self) -> bool:
        """Return whether the peer has ended the connection, even if bytes are still unread. From any thread."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End the connection and every wait on it. From any thread; the socket stays until :meth:`close`."""
        shut_socket(self._sock)

    def drain(self, until: float) -> None:
        """Wait until the peer has closed the connection, and discard what it still sends.

        Closing at once would reset the connection before the peer has read what was sent last.
        """
        with suppress(SeatLost, OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            for _ in range(_DRAIN_BYTES // 4096):
                if self._attempt(lambda: socket.socket.recv(self._sock, 4096), select.POLLIN, until) == b"":
                    return

    def close(self) -> None:
        """Close the socket; no other thread may use it any more."""
        self._sock.close()

    def _send_some(self, parts: list[memoryview]) -> int:
        return self._sock.send(parts[0]) if self._tls else self._sock.sendmsg(parts[:_BUFFERS_PER_SEND])

    def _attempt(self, operation: Callable[[], T], event: int, until: float | None) -> T:
        limit = time.monotonic() + self.silence_s if until is None else until
        while True:
            try:
                with self._turn:
                    return operation()
            except (BlockingIOError, InterruptedError):
                wanted = event
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except (OSError, ValueError) as error:
                raise SeatLost(f"The connection to {self.name} broke: {error}.") from error
            self._wait(wanted, limit)

    def _wait(self, event: int, limit: float) -> None:
        left_s = limit - time.monotonic()
        if left_s <= 0:
            raise SeatLost(f"{self.name} was silent for too long.", hint="Is it overloaded, or is the network down?")
        poll = select.poll()
        try:
            poll.register(self._sock, event)
        except (OSError, ValueError) as error:
            raise SeatLost(f"The connection to {self.name} is closed.") from error
        poll.poll(min(left_s, _RECHECK_S) * 1000)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises PortInUse where the address is not free."""
    try:
        if ":" not in host:
            return socket.create_server((host, port), backlog=_BACKLOG)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise PortInUse(f"Cannot listen on {host}:{port}: {error}.", hint="Choose another port.") from error


def shut_socket(sock: socket.socket) -> None:
    """End what ``sock`` is connected to or listens for, and every wait on it; it stays open."""
    with suppress(OSError):  # SSLSocket's own would turn TLS off under the thread that reads
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
