"""From two offers in a handshake to a lane that has carried bytes there and back. Never on the path of a call: rows go
in frames meanwhile.

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

_UNHANG_S = 0.2
"""Whoever waits for an entry of a store ends sooner once that is closed."""


class Owner(Protocol):
    """What an opening asks of the process's lanes."""

    def open(self, stores: tuple[PairStore, PairStore], rank: int, host: str) -> Lane:
        """A lane over groups that meet at ``stores``; may publish."""
        ...

    def left(self, opening: threading.Thread) -> None:
        """Nobody waits for ``opening`` any more, which hangs."""
        ...

    def refuse_if_many_hang(self) -> None:
        """Raises LaneFailed where too many openings publish."""
        ...


class Opening:
    """One attempt at a lane, in a thread of its own: making a group has no deadline, so nobody waits inside."""

    def __init__(
        self, lanes: Owner, peer: Peer, rank: int, seconds: float, adopted: Callable[[], None] = lambda: None
    ) -> None:
        """``adopted`` is called, by that thread, when rows may go by the lane."""
        self._lanes, self._peer, self._rank, self._adopted = lanes, peer, rank, adopted
        self._seconds, self._until = seconds, deadline_in(seconds)
        self._told, self._cancelled = threading.Event(), threading.Event()
        self._stores = PairStore("forth/", self._tell, seconds), PairStore("back/", self._tell, seconds)
        self._problem: ExpertMeshError | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane of {peer.name}", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive() and not self._cancelled.is_set()

    def take(self, frame: Frame) -> bool:
        """Whether the other end has its lane. Raises LaneFailed where it tells that it has none."""
        if frame.kind != Kind.LANE:
            return False
        note = message_of(frame, LaneNote)
        if note.problem:
            raise LaneFailed(f"{self._peer.name} has no lane: {note.problem}")
        for store in self._stores:
            store.put(note.key, note.value)
        if not note.key:
            self._told.set()
        return not note.key

    def process(self, frame: Frame) -> None:
        """As :meth:`take`; an attention worker that gives the lane up sends its rows in frames."""
        try:
            self.take(frame)
        except LaneFailed as error:
            log.info("%s", error)
            self.cancel()

    def wait(self) -> None:
        """Until the lane is there. Raises LaneFailed as :meth:`check`."""
        self._thread.join(max(0.0, self._until - deadline_in(0)))
        self.check()

    def check(self) -> None:
        """Raises LaneFailed: there is no lane, or not in time."""
        if self._problem is not None:
            raise LaneFailed(f"No lane to {self._peer.name}: {self._problem.message}") from self._problem
        if self._thread.is_alive() and deadline_in(0) >= self._until:
            raise LaneFailed(f"No lane to {self._peer.name} within {self._seconds:g} s.")

    def cancel(self) -> None:
        """Nobody waits for the lane any more. One that is there ends with its connection. Twice is once."""
        if self._cancelled.is_set():
            return
        self._cancelled.set()
        self._told.set()
        for store in self._stores:
            store.close()
        self._thread.join(_UNHANG_S)
        if self._thread.is_alive():
            self._lanes.left(self._thread)

    def _tell(self, key: str, value: bytes) -> None:
        self._peer.send(Kind.LANE, LaneNote(key=key, value=value))

    def _run(self) -> None:
        try:
            self._lanes.refuse_if_many_hang()
            lane = self._lanes.open(self._stores, self._rank, self._peer.local_host)
        except Exception as error:  # noqa: BLE001  the thread's boundary: `wait` and the other end are told
            self._fail(_typed(error))
            return
        try:
            (_prove if self._rank == ATTENTION else _echo)(lane, self._until, self._peer.broken)
            if self._rank == ATTENTION:
                self._wait_told()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(_typed(error))
            lane.abort()
            return
        self._peer.adopt(lane)
        if self._rank == EXPERTS:
            self._peer.send(Kind.LANE, LaneNote(key="", value=b""))
        self._adopted()

    def _wait_told(self) -> None:
        """The other end reads rows from its lane only once it says that it has one."""
        if not self._told.wait(max(0.0, self._until - deadline_in(0))) or self._cancelled.is_set():
            raise LaneFailed(f"{self._peer.name} did not say that it has its lane.")

    def _fail(self, error: ExpertMeshError) -> None:
        self._problem = error
        if self._rank == EXPERTS:
            log.warning("No lane to %s: %s", self._peer.name, error)
            self._peer.send(Kind.LANE, LaneNote(key="", value=b"", problem=error.message[:1000]))


class Attempt:
    """The attention side's, beside calls that go in frames meanwhile. For the thread that receives.

    Args:
        opening: the lane that is being opened.
    """

    def __init__(self, peer: Peer, opening: Opening) -> None:
        self._peer, self._opening = peer, opening

    def over(self, frame: Frame) -> bool:
        """Whether rows go by the lane. Asked with each frame: they come at least as often as signs of life.

        Raises:
            LaneFailed: there is no lane at one end, or not in time.
        """
        if self._peer.lane is None:
            self._opening.check()  # before what the other end says of it
        self._opening.take(frame)
        return self._peer.lane is not None

    def give_up(self, error: LaneFailed) -> None:
        """Tell the other end that none of its rows will come by a lane."""
        self._opening.cancel()
        self._peer.send(Kind.LANE, LaneNote(key="", value=b"", problem=error.message[:1000]))

    def cancel(self) -> None:
        """The connection has ended."""
        self._opening.cancel()


def _prove(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    sent = torch.frombuffer(bytearray(os.urandom(ECHO_BYTES)), dtype=torch.uint8)
    shipment = lane.pack(sent)
    lane.post(shipment, broken, first=True)
    with lane.reading():
        came = lane.receive(torch.empty_like(shipment.rows), until, broken, first=True).cpu()
    if zlib.crc32(bytes_of(came)) != zlib.crc32(bytes_of(sent)):
        raise LaneFailed("Other bytes came back over the lane than were sent.")


def _echo(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    with lane.reading():
        came = lane.receive(torch.empty(ECHO_BYTES, dtype=torch.uint8, device=lane.device), until, broken, first=True)
        shipment = lane.pack(came)
    lane.post(shipment, broken, first=True)
    lane.finish(until, broken)


def _typed(error: Exception) -> ExpertMeshError:
    return error if isinstance(error, ExpertMeshError) else LaneFailed(f"{type(error).__name__}: {error}")
