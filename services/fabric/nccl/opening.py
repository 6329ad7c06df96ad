"""Opens one lane: from two offers in a handshake to a lane that has carried bytes there and back. Rows of calls go in
frames meanwhile.

both       -> LANE  entries of the groups' stores, such as NCCL's unique id
attention  ~~ bytes over the lane ~~> experts ~~> attention
experts    -> LANE  ready, or the problem
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable
from typing import Protocol

import torch

from services.errors import ExpertMeshError, LaneFailed
from services.fabric.nccl.lane import ATTENTION, EXPERTS, Lane
from services.fabric.nccl.messages import LaneNote
from services.fabric.nccl.pair_store import PairStore
from services.fabric.tcp.frames import ECHO_BYTES, Frame, Kind, bytes_of, message_of
from services.fabric.tcp.peer import Peer, deadline_in

log = logging.getLogger(__name__)

_END_S = 0.2
"""Longest wait for the end of a thread that waits for an entry of a store, once the store is closed."""


class Owner(Protocol):
    """The process's lanes, as far as an opening needs them."""

    def open(self, stores: tuple[PairStore, PairStore], rank: int, host: str) -> Lane:
        """Return a lane over two groups, which the ends make by ``stores``; this may never return."""
        ...

    def note_stuck(self, opening: threading.Thread) -> None:
        """Count a thread that is stuck in the library and that nobody waits for any more."""
        ...

    def refuse_if_many_stuck(self) -> None:
        """Raise LaneFailed where too many openings are stuck."""
        ...


class Opening:
    """One attempt to open a lane, in a thread of its own: making a group has no deadline, so that nobody waits inside.

    The attention side's is a :class:`services.fabric.tcp.extension.TransportAttempt`.

    Args:
        seconds: longest time until the lane is there.
        adopted: called by the thread when rows may go by the lane.
    """

    def __init__(
        self, lanes: Owner, peer: Peer, rank: int, seconds: float, adopted: Callable[[], None] = lambda: None
    ) -> None:
        self._lanes, self._peer, self._rank, self._adopted = lanes, peer, rank, adopted
        self._seconds, self._until = seconds, deadline_in(seconds)
        self._confirmed, self._cancelled = threading.Event(), threading.Event()
        self._stores = PairStore("forth/", self._send_note, seconds), PairStore("back/", self._send_note, seconds)
        self._problem: ExpertMeshError | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane of {peer.name}", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive() and not self._cancelled.is_set()

    def take(self, frame: Frame) -> bool:
        """Handle a frame of kind LANE; return whether it says that the other end has its lane.

        Raises:
            LaneFailed: the frame says that the other end has none.
        """
        if frame.kind != Kind.LANE:
            return False
        note = message_of(frame, LaneNote)
        if note.problem:
            raise LaneFailed(f"{self._peer.name} has no lane: {note.problem}")
        for store in self._stores:
            store.put(note.key, note.value)
        if not note.key:
            self._confirmed.set()
        return not note.key

    def process(self, frame: Frame) -> None:
        """Handle a frame at the expert side; an attention worker that gives the lane up sends its rows in frames."""
        try:
            self.take(frame)
        except LaneFailed as error:
            log.info("%s", error)
            self.cancel()

    def over(self, frame: Frame) -> bool:
        if self._peer.lane is None:
            self._check()  # before what the other end says of it
        self.take(frame)
        return self._peer.lane is not None

    def wait(self) -> None:
        """Wait for the lane. Raises LaneFailed where there is none, or not in time."""
        self._thread.join(max(0.0, self._until - deadline_in(0)))
        self._check()

    def give_up(self, error: LaneFailed) -> None:
        self.cancel()
        self._send_note("", b"", error)

    def cancel(self) -> None:
        """Wait for the lane no longer. A lane that is there ends with its connection. A second call does nothing."""
        if self._cancelled.is_set():
            return
        self._cancelled.set()
        self._confirmed.set()
        for store in self._stores:
            store.close()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._lanes.note_stuck(self._thread)

    def _check(self) -> None:
        if self._problem is not None:
            raise LaneFailed(f"No lane to {self._peer.name}: {self._problem.message}") from self._problem
        if self._thread.is_alive() and deadline_in(0) >= self._until:
            raise LaneFailed(f"No lane to {self._peer.name} within {self._seconds:g} s.")

    def _send_note(self, key: str, value: bytes, error: ExpertMeshError | None = None) -> None:
        problem = error.message[:1000] if error is not None else ""
        self._peer.send(Kind.LANE, LaneNote(key=key, value=value, problem=problem))

    def _run(self) -> None:
        try:
            self._lanes.refuse_if_many_stuck()
            lane = self._lanes.open(self._stores, self._rank, self._peer.local_host)
        except Exception as error:  # noqa: BLE001  the thread's boundary: `wait` and the other end get the error
            self._fail(_typed(error))
            return
        try:
            (_prove if self._rank == ATTENTION else _echo)(lane, self._until, self._peer.broken)
            if self._rank == ATTENTION:
                self._wait_confirmed()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(_typed(error))
            lane.abort()
            return
        self._peer.adopt(lane)
        if self._rank == EXPERTS:
            self._send_note("", b"")
        self._adopted()

    def _wait_confirmed(self) -> None:
        """Wait for the other end's note: it reads rows from its lane only once it has sent that."""
        if not self._confirmed.wait(max(0.0, self._until - deadline_in(0))) or self._cancelled.is_set():
            raise LaneFailed(f"{self._peer.name} did not confirm its lane.")

    def _fail(self, error: ExpertMeshError) -> None:
        self._problem = error
        if self._rank == EXPERTS:
            log.warning("no lane to %s: %s", self._peer.name, error)
            self._send_note("", b"", error)


def _prove(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    sent = torch.frombuffer(bytearray(os.urandom(ECHO_BYTES)), dtype=torch.uint8)
    shipment = lane.pack(sent)
    lane.post(shipment, broken, first=True)
    with lane.reading():
        came = lane.receive(torch.empty_like(shipment.rows), until, broken, first=True).cpu()
    if zlib.crc32(bytes_of(came)) != zlib.crc32(bytes_of(sent)):
        raise LaneFailed("The bytes that came back over the lane are not those that were sent.")


def _echo(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    with lane.reading():
        came = lane.receive(torch.empty(ECHO_BYTES, dtype=torch.uint8, device=lane.device), until, broken, first=True)
        shipment = lane.pack(came)
    lane.post(shipment, broken, first=True)
    lane.finish(until, broken)


def _typed(error: Exception) -> ExpertMeshError:
    return error if isinstance(error, ExpertMeshError) else LaneFailed(f"{type(error).__name__}: {error}")
