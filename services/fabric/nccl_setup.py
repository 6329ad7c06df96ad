"""From two offers in a handshake to a lane that has carried bytes there and back. Never on the path of a call.

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

import msgspec
import torch

from services.errors import ExpertMeshError, LaneFailed, ProtocolMismatch, SeatLeaving, SeatLost
from services.fabric.nccl_groups import Groups, groups_for
from services.fabric.nccl_lane import ATTENTION, EXPERTS, Lane, Launches
from services.fabric.nccl_store import PairStore
from services.fabric.tcp_handshake import Hello
from services.fabric.tcp_peer import Peer, soon
from services.fabric.tcp_wire import Frame, Kind, LaneNote, bytes_of, message_of

log = logging.getLogger(__name__)

_ECHO_BYTES = 1 << 12
_UNHANG_S = 0.2
"""Whoever waits for an entry of a store ends sooner once that is closed."""
OPENING_S = 30.0
"""Longest time from two offers to a lane; NCCL takes a second, more where a GPU is new to the process."""
ENDING_S = 2.0
MOST_HUNG = 4
"""Openings that may hang in one process before it tries no more of them."""


class Lanes:
    """What one process does about lanes. Give each device one of these.

    Args:
        required: refuse seats that can have no lane.
    """

    def __init__(self, groups: Groups, *, required: bool = False, opening_s: float = OPENING_S) -> None:
        self._groups, self._required, self._opening_s = groups, required, opening_s
        self._launches = Launches()
        self._gate = threading.Lock()
        self._hung: list[threading.Thread] = []

    @property
    def device(self) -> torch.device:
        return self._groups.device

    @property
    def required(self) -> bool:
        return self._required

    def offered(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, lane=self._groups.name, device=self._groups.identity())

    def agreed(self, theirs: Hello, name: str) -> bool:
        """Whether the other end offers the same; two ends on one GPU can have no communicator.

        Raises:
            ProtocolMismatch: a lane is required and cannot be.
        """
        same = theirs.lane == self._groups.name and (not theirs.device or theirs.device != self._groups.identity())
        if self._required and not same:
            raise ProtocolMismatch(
                f"{name} can have no {self._groups.name} lane: it offers {theirs.lane or 'none'}"
                f"{', on the same device' if theirs.lane == self._groups.name else ''}.",
                hint="Start it with the same --fabric-lane, or both with auto.",
            )
        return same

    def join(self, peer: Peer) -> None:
        """The attention side's part, in the thread that receives.

        Raises:
            LaneFailed: there is no lane; the connection should end, as the other side may believe in one.
            SeatLeaving, SeatLost, WireError: as frames say.
        """
        self.refuse_if_many_hang()
        until = soon(self._opening_s)
        opening = Opening(self, peer, ATTENTION, self._opening_s)
        try:
            while not opening.take(frame := _next_frame(peer, until)):
                if frame.kind == Kind.LEAVING:
                    raise SeatLeaving(f"{peer.name} is leaving.", hint="The routing table will follow.")
            opening.wait(until)
        except BaseException:
            opening.cancel()
            raise

    def welcome(self, peer: Peer) -> Opening:
        """The expert side's part, in the background; frames of kind LANE go to :meth:`Opening.take`."""
        return Opening(self, peer, EXPERTS, self._opening_s)

    def wait_ended(self, seconds: float = ENDING_S) -> bool:
        """Before the process exits: whether the lanes that were ended are gone."""
        return self._launches.wait_ended(seconds)

    def left(self, opening: threading.Thread) -> None:
        """Nobody waits any more for ``opening``, which hangs inside the library: nothing can end it."""
        with self._gate:
            self._hung.append(opening)
        log.warning("%d openings of %s lanes hang; each keeps a thread.", self.hung(), self._groups.name)

    def hung(self) -> int:
        """Openings that outlived their time and still run."""
        with self._gate:
            self._hung = [thread for thread in self._hung if thread.is_alive()]
            return len(self._hung)

    def refuse_if_many_hang(self) -> None:
        """Raises LaneFailed: no more threads are given to openings."""
        if self.hung() >= MOST_HUNG:
            raise LaneFailed(f"{MOST_HUNG} openings of {self._groups.name} lanes hang here already.")

    def open(self, stores: tuple[PairStore, PairStore], rank: int, host: str) -> Lane:
        return Lane(self._groups, self._launches, stores, rank, host)


def lanes_for(choice: str, device: torch.device, *, required: bool = False) -> Lanes | None:
    """What ``--fabric-lane`` asks for. Raises ConfigError where this machine cannot do it."""
    groups = groups_for(choice, device)
    return None if groups is None else Lanes(groups, required=required)


class Opening:
    """One attempt at a lane, in a thread of its own: making a group has no deadline, so nobody waits inside."""

    def __init__(self, lanes: Lanes, peer: Peer, rank: int, seconds: float) -> None:
        self._lanes, self._peer, self._rank = lanes, peer, rank
        self._seconds = seconds
        self._stores = PairStore("forth/", self._tell, seconds), PairStore("back/", self._tell, seconds)
        self._problem: ExpertMeshError | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane of {peer.name}", daemon=True)
        self._thread.start()

    def take(self, frame: Frame) -> bool:
        """Whether the other end has its lane. Raises LaneFailed where it tells that it has none."""
        if frame.kind != Kind.LANE:
            return False
        note = message_of(frame, LaneNote)
        if note.problem:
            raise LaneFailed(f"{self._peer.name} has no lane: {note.problem}")
        for store in self._stores:
            store.put(note.key, note.value)
        return not note.key

    def wait(self, until: float) -> None:
        self._thread.join(max(0.0, until - soon(0)))
        if self._problem is not None:
            raise LaneFailed(f"No lane to {self._peer.name}: {self._problem.message}") from self._problem
        if self._thread.is_alive():
            raise LaneFailed(f"No lane to {self._peer.name} within {self._seconds:g} s.")

    def cancel(self) -> None:
        """Nobody waits for the lane any more. One that is there ends with its connection."""
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
            (_prove if self._rank == ATTENTION else _echo)(lane, soon(self._seconds), self._peer.broken)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(_typed(error))
            lane.abort()
            return
        self._peer.adopt(lane)
        if self._rank == EXPERTS:
            self._peer.send(Kind.LANE, LaneNote(key="", value=b""))

    def _fail(self, error: ExpertMeshError) -> None:
        self._problem = error
        if self._rank == EXPERTS:
            log.warning("No lane to %s: %s", self._peer.name, error)
            self._peer.send(Kind.LANE, LaneNote(key="", value=b"", problem=error.message[:1000]))


def _next_frame(peer: Peer, until: float) -> Frame:
    try:
        return peer.receive(until)
    except SeatLost as error:
        if soon(0) < until:
            raise
        raise LaneFailed(f"{peer.name} made no lane in time.") from error


def _prove(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    sent = torch.frombuffer(bytearray(os.urandom(_ECHO_BYTES)), dtype=torch.uint8)
    shipment = lane.pack(sent)
    lane.post(shipment, broken, first=True)
    with lane.reading():
        came = lane.receive(torch.empty_like(shipment.rows), until, broken, first=True).cpu()
    if zlib.crc32(bytes_of(came)) != zlib.crc32(bytes_of(sent)):
        raise LaneFailed("Other bytes came back over the lane than were sent.")


def _echo(lane: Lane, until: float, broken: Callable[[], bool]) -> None:
    with lane.reading():
        came = lane.receive(torch.empty(_ECHO_BYTES, dtype=torch.uint8, device=lane.device), until, broken, first=True)
        shipment = lane.pack(came)
    lane.post(shipment, broken, first=True)
    lane.finish(until, broken)


def _typed(error: Exception) -> ExpertMeshError:
    return error if isinstance(error, ExpertMeshError) else LaneFailed(f"{type(error).__name__}: {error}")
