"""The ranks' store behind a proxy: torch's store authenticates nobody, so that it listens on loopback alone.

    rank's store client -> ClientProxy on its loopback ==(handshake, tcp/handshake.py)==> ServerProxy of rank 0 -> store
    on loopback

Only peers that know the secret get through the proxy. The bytes are neither encrypted nor signed, and other users of a
rank's machine can reach its loopback.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from services.errors import ExpertMeshError
from services.fabric.faults import Faults
from services.fabric.tcp.handshake import Hello, admit, greet
from services.fabric.tcp.reception import Arrival, Reception
from services.fabric.tcp.stream import Stream, shut_socket

HANDSHAKE_S = 5.0
LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16
_MOST = 4096
"""Largest number of proven connections; each rank has a few."""

log = logging.getLogger(__name__)


class _Proxy:
    """Listens, and joins each accepted connection with one that :meth:`_other` opens."""

    def __init__(self, listener: socket.socket, name: str, faults: Faults | None = None) -> None:
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._far: set[socket.socket] = set()
        self._reception = Reception(listener, self._join, who="rank", faults=faults or Faults(), max_proven=_MOST)
        threading.Thread(target=self._reception.run, name=name, daemon=True).start()

    def close(self) -> None:
        """End all connections and stop listening."""
        self._reception.end()
        self._reception.close()
        with self._lock:
            for sock in self._far:
                shut_socket(sock)

    def _other(self, near: Arrival) -> socket.socket:
        """Open the other connection. Raises ExpertMeshError or OSError."""
        raise NotImplementedError

    def _join(self, near: Arrival) -> None:
        with self._other(near) as far:
            self._reception.prove(near)
            for sock in (near.sock, far):
                sock.settimeout(None)  # a rank may be silent for as long as there is no work
            with self._lock:
                self._far.add(far)
            try:
                back = threading.Thread(target=_pass_on, args=(far, near.sock), daemon=True)
                back.start()
                _pass_on(near.sock, far)
                back.join()
            finally:
                with self._lock:
                    self._far.discard(far)


class ServerProxy(_Proxy):
    """Rank 0's proxy: lets peers that prove to know ``secret`` through to ``port`` on loopback.

    Args:
        package: release of this process, see :class:`services.fabric.tcp.handshake.Hello`.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        port: int,
        name: str,
        package: str = "",
        faults: Faults | None = None,
    ) -> None:
        self._secret, self._store_port, self._hello = secret, port, _hello(name, package)
        super().__init__(listener, "store proxy", faults)

    def _other(self, near: Arrival) -> socket.socket:
        stream = Stream(near.sock, silence_s=HANDSHAKE_S, name=near.name)
        admit(stream, self._secret, self._hello, time.monotonic() + HANDSHAKE_S)
        return socket.create_connection((LOOPBACK, self._store_port), HANDSHAKE_S)


class ClientProxy(_Proxy):
    """Another rank's proxy: joins connections to :attr:`port` on loopback with rank 0's proxy at ``address``.

    Raises:
        SecretMismatch, ProtocolMismatch, OSError, FabricError: rank 0's proxy cannot be reached, or refuses.
    """

    def __init__(self, address: str, port: int, *, secret: bytes, name: str, package: str = "") -> None:
        self._address, self._secret, self._hello = (address, port), secret, _hello(name, package)
        self._connect().close()
        super().__init__(socket.create_server((LOOPBACK, 0)), "store proxy")

    def _other(self, near: Arrival) -> socket.socket:  # noqa: ARG002 - a client on loopback proves nothing
        try:
            return self._connect()
        except (ExpertMeshError, OSError) as error:
            log.warning("cannot reach the ranks' store: %s", error)
            raise

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, HANDSHAKE_S)
        try:
            stream = Stream(sock, silence_s=HANDSHAKE_S, name="rank 0 at {}:{}".format(*self._address))
            greet(stream, self._secret, self._hello, time.monotonic() + HANDSHAKE_S)
        except BaseException:
            sock.close()
            raise
        return sock


def _hello(name: str, package: str) -> Hello:
    """Return facts that are equal in all ranks: the handshake only proves the secret, ``rendezvous`` compares more."""
    return Hello(fingerprint="ranks", worker=name, hidden=0, dtype="float32", package=package)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on until either connection ends; then end both."""
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    shut_socket(source)
    shut_socket(sink)
