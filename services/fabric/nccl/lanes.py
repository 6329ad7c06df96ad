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

import msgspec
import torch

from services.errors import ExpertMeshError, LaneFailed, ProtocolMismatch, SeatLeaving, SeatLost
from services.fabric.nccl.lane import ATTENTION, EXPERTS, Lane, Launches
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Groups, groups_for
from services.fabric.tcp.frames import ECHO_BYTES, Frame, Kind, LaneNote, bytes_of, message_of
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer, soon

log = logging.getLogger(__name__)

_UNHANG_S = 0.2
"""Whoever waits for an entry of a store ends sooner once that is closed."""
OPENING_S = 30.0
"""Longest time from two offers to a lane; NCCL takes a second, more where a GPU is new to the process."""
ENDING_S = 2.0
_KIND = "/2"
"""Of the use of a lane. Ends that differ in it have none: an older one expects all rows on it, once it is there."""
FRAMES_BYTES = 96 << 10
"""Below this rows are there sooner in frames than over NCCL, which needs both hosts as well (docs/adr/0006)."""
MOST_HUNG = 4
"""Openings that may hang in one process before it tries no more of them."""


class Lanes:
    """What one process does about lanes. Give each device one of these.

    Args:
        required: refuse seats that can have no lane.
        least_bytes: of a call's rows or its answer's, from which on they go by the lane.
    """

    def __init__(
        self, groups: Groups, *, required: bool = False, opening_s: float = OPENING_S, least_bytes: int = 0
    ) -> None:
        self._groups, self._required, self._opening_s = groups, required, opening_s
        self.least_bytes = least_bytes
        self._offer = f"{groups.name}{_KIND}"
        self._launches = Launches()
        self._gate = threading.Lock()
        self._hung: list[threading.Thread] = []
        self._approaching: list[Opening] = []

    @property
    def device(self) -> torch.device:
        return self._groups.device

    @property
    def required(self) -> bool:
        return self._required

    def offered(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, lane=self._offer, device=self._groups.identity())

    def agreed(self, theirs: Hello, name: str) -> bool:
        """Whether the other end offers the same; two ends on one GPU can have no communicator.

        Raises:
            ProtocolMismatch: a lane is required and cannot be.
        """
        same = theirs.lane == self._offer and (not theirs.device or theirs.device != self._groups.identity())
        if self._required and not same:
            raise ProtocolMismatch(
                f"{name} can have no {self._groups.name} lane: it offers {theirs.lane or 'none'}"
                f"{', on the same device' if theirs.lane == self._offer else ''}.",
                hint="Start it with the same --fabric-lane, or both with auto.",
            )
        return same

    def join(self, peer: Peer) -> None:
        """The attention side's part, in the thread that receives.

        Raises:
            LaneFailed: there is no lane; the connection should end, as the other side may believe in one.
            SeatLeaving, SeatLost, WireError: as frames say.
        """
        until = soon(self._opening_s)
        opening = self.approach(peer, lambda: None)
        assert opening is not None, "not asked to be alone"
        try:
            while not opening.take(frame := _next_frame(peer, until)):
                if frame.kind == Kind.LEAVING:
                    raise SeatLeaving(f"{peer.name} is leaving.", hint="The routing table will follow.")
            opening.wait()
        except BaseException:
            opening.cancel()
            raise

    def welcome(self, peer: Peer) -> Opening:
        """The expert side's part, in the background; frames of kind LANE go to :meth:`Opening.heed`."""
        return Opening(self, peer, EXPERTS, self._opening_s)

    def approach(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> Opening | None:
        """The attention side's part, in the background; None where it is to be ``alone`` and another one is under way.

        Raises LaneFailed as :meth:`refuse_if_many_hang`.
        """
        self.refuse_if_many_hang()
        with self._gate:
            under_way = [other for other in self._approaching if other.under_way]
            if alone and under_way:
                return None
            opening = Opening(self, peer, ATTENTION, self._opening_s, adopted)
            self._approaching = [*under_way, opening]
        return opening

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
    if groups is None:
        return None
    return Lanes(groups, required=required, least_bytes=FRAMES_BYTES if groups.name == "nccl" else 0)


class Opening:
    """One attempt at a lane, in a thread of its own: making a group has no deadline, so nobody waits inside."""

    def __init__(
        self, lanes: Lanes, peer: Peer, rank: int, seconds: float, adopted: Callable[[], None] = lambda: None
    ) -> None:
        """``adopted`` is called, by that thread, when rows may go by the lane."""
        self._lanes, self._peer, self._rank, self._adopted = lanes, peer, rank, adopted
        self._seconds, self._until = seconds, soon(seconds)
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

    def heed(self, frame: Frame) -> None:
        """As :meth:`take`; an attention worker that gives the lane up sends its rows in frames."""
        try:
            self.take(frame)
        except LaneFailed as error:
            log.info("%s", error)
            self.cancel()

    def wait(self) -> None:
        """Until the lane is there. Raises LaneFailed as :meth:`check`."""
        self._thread.join(max(0.0, self._until - soon(0)))
        self.check()

    def check(self) -> None:
        """Raises LaneFailed: there is no lane, or not in time."""
        if self._problem is not None:
            raise LaneFailed(f"No lane to {self._peer.name}: {self._problem.message}") from self._problem
        if self._thread.is_alive() and soon(0) >= self._until:
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
        if not self._told.wait(max(0.0, self._until - soon(0))) or self._cancelled.is_set():
            raise LaneFailed(f"{self._peer.name} did not say that it has its lane.")

    def _fail(self, error: ExpertMeshError) -> None:
        self._problem = error
        if self._rank == EXPERTS:
            log.warning("No lane to %s: %s", self._peer.name, error)
            self._peer.send(Kind.LANE, LaneNote(key="", value=b"", problem=error.message[:1000]))


class Attempt:
    """The attention side's, beside calls that go in frames meanwhile. For the thread that receives.

    Args:
        opening: what came of :meth:`Lanes.approach`.
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


def _next_frame(peer: Peer, until: float) -> Frame:
    try:
        return peer.receive(until)
    except SeatLost as error:
        if soon(0) < until:
            raise
        raise LaneFailed(f"{peer.name} made no lane in time.") from error


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
