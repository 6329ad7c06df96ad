"""The ranks' store behind a door: torch's store asks nobody who he is, so it listens on loopback alone.

    rank's store client -> Tunnel on its loopback ==(handshake, tcp_handshake.py)==> Gate of rank 0 -> store on loopback

Only what knows the secret gets through the gate. What passes is neither encrypted nor signed, and other users of a
rank's machine can reach its loopback.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from services.errors import ExpertMeshError
from services.fabric.tcp_handshake import Hello, admit, greet
from services.fabric.tcp_stream import Stream, shut_socket

HANDSHAKE_S = 5.0
MOST_PENDING = 64
"""Connections that have not proven anything yet."""
LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16

log = logging.getLogger(__name__)
_AGAIN_S = 0.05


class _Door:
    """Listens, and joins every connection that comes to one that :meth:`_other` opens; ends all with :meth:`close`."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        self._listener = listener
        self._gate = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._pending = threading.BoundedSemaphore(MOST_PENDING)
        self.port: int = listener.getsockname()[1]
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        shut_socket(self._listener)
        self._listener.close()
        with self._gate:
            for sock in self._open:
                shut_socket(sock)

    def _other(self, near: socket.socket, peer: str) -> socket.socket:
        """Raises ExpertMeshError or OSError."""
        raise NotImplementedError

    def _serve(self) -> None:
        while True:
            try:
                near, address = self._listener.accept()
            except OSError as error:
                if self._closed.wait(_AGAIN_S):
                    return
                log.warning("the ranks' gate could not take a connection: %s", error)
                continue
            if not self._pending.acquire(blocking=False):
                near.close()
                continue
            threading.Thread(target=self._join, args=(near, f"{address[0]}:{address[1]}"), daemon=True).start()

    def _join(self, near: socket.socket, peer: str) -> None:
        far = None
        try:
            try:
                far = self._other(near, peer)
            finally:
                self._pending.release()
            for sock in (near, far):
                sock.settimeout(None)  # a rank may be silent for as long as there is no work
            with self._gate:
                self._open |= {near, far}
            back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
            back.start()
            _pass_on(near, far)
            back.join()
        except (ExpertMeshError, OSError) as error:
            log.warning("no way to the ranks' store for %s: %s", peer, error)
        finally:
            with self._gate:
                self._open -= {near, far} if far else {near}
            near.close()
            if far is not None:
                far.close()


class Gate(_Door):
    """Rank 0's: lets those through to ``port`` on loopback who prove that they know ``secret``."""

    def __init__(self, listener: socket.socket, *, secret: bytes, port: int, name: str) -> None:
        self._secret, self._store_port, self._hello = secret, port, _hello(name)
        super().__init__(listener, "gate")

    def _other(self, near: socket.socket, peer: str) -> socket.socket:
        stream = Stream(near, silence_s=HANDSHAKE_S, name=peer)
        admit(stream, self._secret, self._hello, time.monotonic() + HANDSHAKE_S)
        return socket.create_connection((LOOPBACK, self._store_port), HANDSHAKE_S)


class Tunnel(_Door):
    """Another rank's: what connects to ``port`` on loopback comes out behind the gate at ``address``."""

    def __init__(self, address: str, port: int, *, secret: bytes, name: str) -> None:
        self._address, self._secret, self._hello = (address, port), secret, _hello(name)
        self._knock().close()
        super().__init__(socket.create_server((LOOPBACK, 0)), "tunnel")

    def _other(self, near: socket.socket, peer: str) -> socket.socket:  # noqa: ARG002 - any may knock
        return self._knock()

    def _knock(self) -> socket.socket:
        """Raises SecretMismatch, OSError or FabricError."""
        sock = socket.create_connection(self._address, HANDSHAKE_S)
        try:
            stream = Stream(sock, silence_s=HANDSHAKE_S, name="rank 0 at {}:{}".format(*self._address))
            greet(stream, self._secret, self._hello, time.monotonic() + HANDSHAKE_S)
        except BaseException:
            sock.close()
            raise
        return sock


def _hello(name: str) -> Hello:
    """What ranks differ in is told by :class:`services.fabric.mesh_join.Facts`; here they only prove the secret."""
    return Hello(fingerprint="ranks", worker=name, hidden=0, dtype="float32")


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Until either ends; then both do."""
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    shut_socket(source)
    shut_socket(sink)
