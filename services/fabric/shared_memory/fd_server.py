"""File descriptors from one process of a node to another, by a secret key: how peers map each other's memory.

The owner publishes a descriptor under a random key; a peer that learns socket and key over an authenticated connection
fetches it. Abstract unix sockets reach as far as the network namespace: a pod, or a host.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

from services.errors import FabricError
from services.fabric.faults import Faults
from services.fabric.tcp.reception import Arrival, Reception

_KEY_BYTES = 16
_WAIT_S = 5.0
_AGAIN_S = 0.01


class FdServer:
    """Gives out published descriptors, from threads of its own, until :meth:`close`."""

    def __init__(self) -> None:
        self.name = f"expertmesh-{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._published: dict[bytes, int] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self.name}")
        listener.listen(64)
        self._reception = Reception(listener, self._give, who="neighbour", faults=Faults(), max_proven=0)
        threading.Thread(target=self._reception.run, name="fd server", daemon=True).start()

    def publish(self, fd: int) -> bytes:
        """Return the key by which peers can fetch ``fd`` until :meth:`withdraw`; the caller closes ``fd``."""
        key = secrets.token_bytes(_KEY_BYTES)
        with self._lock:
            self._published[key] = fd
        return key

    def withdraw(self, key: bytes) -> None:
        """Give the descriptor under ``key`` to nobody any more."""
        with self._lock:
            self._published.pop(key, None)

    def close(self) -> None:
        """End all connections and stop listening."""
        self._reception.end()
        self._reception.close()

    def _give(self, arrival: Arrival) -> None:
        """Serve one connection: it proves itself by naming a key, and ends then."""
        arrival.sock.settimeout(_WAIT_S)
        key = arrival.sock.recv(_KEY_BYTES, socket.MSG_WAITALL)
        with self._lock:  # so that the descriptor is not closed, and its number given away, meanwhile
            if key in self._published:
                socket.send_fds(arrival.sock, [b"+"], [self._published[key]])


def fetch_fd(name: str, key: bytes) -> int:
    """Return a new descriptor for what the server ``name`` has published under ``key``; the caller closes it.

    Raises:
        FabricError: there is no such server within reach, or it has nothing under that key.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WAIT_S)
        try:
            _connect(connection, f"\0{name}")
            connection.sendall(key)
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except (OSError, ValueError) as error:
            raise FabricError(f"Cannot get shared memory from {name}: {error}.", hint=_HINT) from error
    if not fds:
        raise FabricError(f"{name} no longer offers that memory.")
    return fds[0]


def _connect(connection: socket.socket, address: str) -> None:
    """Connect, and try again while the server's backlog is full: a unix socket does not wait for that by itself."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


_HINT = "Do both workers run in the same network namespace?"
