"""Accepts connections, with a thread for each from its first byte to its end. Unknown clients keep no peer out.

Connections that have proven nothing yet are counted separately. There is room for few of them, and the oldest gives way
to the next: a client that connects and says nothing costs a thread for as long as a handshake may take, and no more.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from services.errors import ExpertMeshError, SeatFull, SeatLost
from services.fabric.faults import CROWDED, Faults, named
from services.fabric.tcp.stream import shut_socket

MAX_UNPROVEN = 64
_RETRY_S = 0.1
_ENDS_S = 1.0
"""Longest wait for the end of a connection that was shut; its thread waits for nothing else."""
_FULL = "Use another replica, or start more."

log = logging.getLogger(__name__)


class Arrival:
    """A connection that was accepted; TLS replaces ``sock``."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock, self.name = sock, name


class Reception:
    """Accepts connections and serves each in a thread. Thread-safe.

    Args:
        converse: serves a connection in its thread, and returns or raises when it ends.
        who: kind of peer that connects here, for names.
        max_proven: largest number of connections that have proven themselves, see :meth:`prove`.
        max_unproven: largest number of the others.
    """

    def __init__(
        self,
        listener: socket.socket,
        converse: Callable[[Arrival], None],
        *,
        who: str,
        faults: Faults,
        max_proven: int,
        max_unproven: int = MAX_UNPROVEN,
    ) -> None:
        self._listener, self._converse, self._who = listener, converse, who
        self._max_proven, self._max_unproven = max_proven, max_unproven
        self._changed = threading.Condition()
        self._threads: dict[Arrival, threading.Thread] = {}
        self._unproven: dict[Arrival, None] = {}
        self._ended = threading.Event()
        self.faults = faults

    def run(self) -> None:
        """Accept connections until :meth:`stop`."""
        while True:
            try:
                sock, address = self._listener.accept()
                self._take(Arrival(sock, f"{self._who} at {address[0]}:{address[1]}" if address else self._who))
            except (OSError, RuntimeError) as error:
                if self._ended.wait(_RETRY_S):
                    return
                log.warning("cannot accept a connection: %s", error)  # no descriptors or threads left, say

    def prove(self, arrival: Arrival) -> None:
        """Note that ``arrival`` knows the secret, so that it never gives way. Raises SeatFull if there is no room."""
        with self._changed:
            if len(self._threads) - len(self._unproven) >= self._max_proven:
                raise SeatFull(f"There are already {self._max_proven} connections here.", hint=_FULL)
            self._unproven.pop(arrival, None)
            self._changed.notify_all()

    def stop(self) -> None:
        """Accept no more connections; those that are here stay."""
        self._ended.set()
        shut_socket(self._listener)

    def end(self) -> list[threading.Thread]:
        """Accept no more connections and end all; return the threads that end by this."""
        self.stop()
        with self._changed:
            for arrival in self._threads:
                shut_socket(arrival.sock)
            return list(self._threads.values())

    def close(self) -> None:
        """Close the listener."""
        self._listener.close()

    def _take(self, arrival: Arrival) -> None:
        thread = threading.Thread(target=self._serve, args=(arrival,), name=arrival.name, daemon=True)
        with self._changed:
            self._make_room()
            if self._ended.is_set():
                arrival.sock.close()
                return
            self._threads[arrival] = thread
            self._unproven[arrival] = None
        try:
            thread.start()
        except RuntimeError:
            self._forget(arrival)
            raise

    def _make_room(self) -> None:
        """End the oldest unproven connections, and wait for that, so that there are never more threads."""
        for oldest in list(self._unproven):
            if len(self._unproven) < self._max_unproven:
                return
            shut_socket(oldest.sock)
            if self.faults.note(CROWDED):
                log.warning(
                    "%d connections have not authenticated; closing the oldest, of the %s",
                    len(self._unproven),
                    oldest.name,
                )
            self._changed.wait_for(lambda: len(self._unproven) < self._max_unproven, _ENDS_S)

    def _serve(self, arrival: Arrival) -> None:
        try:
            self._converse(arrival)
        except Exception as error:  # noqa: BLE001  the thread's boundary: the other connections live on
            self._note_end(arrival, error)
        finally:
            self._forget(arrival)

    def _note_end(self, arrival: Arrival, error: Exception) -> None:
        reported = self.faults.ended_by(error) or arrival not in self._unproven
        if isinstance(error, SeatLost):
            log.log(logging.INFO if reported else logging.DEBUG, "%s", error)
        elif reported:
            known = isinstance(error, ExpertMeshError | OSError)
            log.warning("closed a connection: %s", named(arrival.name, error), exc_info=None if known else error)

    def _forget(self, arrival: Arrival) -> None:
        arrival.sock.close()
        with self._changed:
            self._unproven.pop(arrival, None)
            self._threads.pop(arrival, None)
            self._changed.notify_all()
