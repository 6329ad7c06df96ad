"""The lanes of a process: whether two ends can have one, how many are opened at a time, and what ends with them.

:mod:`services.fabric.nccl.opening` opens one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
import torch

from services.errors import LaneFailed, ProtocolMismatch, SeatLeaving, SeatLost
from services.fabric.nccl.lane import ATTENTION, EXPERTS, Lane, Launches
from services.fabric.nccl.opening import Attempt, Opening
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Groups, groups_for
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import Frame, Kind
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer, deadline_in

log = logging.getLogger(__name__)

OPENING_S = 30.0
"""Longest time from two offers to a lane; NCCL takes a second, more where a GPU is new to the process."""
ENDING_S = 2.0
_KIND = "/2"
"""Of the use of a lane. Ends that differ in it have none: an older one expects all rows on it, once it is there."""
FRAMES_BYTES = 96 << 10
"""Below this rows are there sooner in frames than over NCCL, which needs both hosts as well (docs/adr/0006)."""
MAX_HUNG = 4
"""Openings that may publish in one process before it tries no more of them."""


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
        self._lock = threading.Lock()
        self._published: list[threading.Thread] = []
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
        until = deadline_in(self._opening_s)
        opening = self._begin(peer, lambda: None)
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
        """The expert side's part, in the background; frames of kind LANE go to :meth:`Opening.process`."""
        return Opening(self, peer, EXPERTS, self._opening_s)

    def approach(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> Attempt | None:
        """The attention side's part, in the background; None where it is to be ``alone`` and another one is under way.

        Raises LaneFailed as :meth:`refuse_if_many_hang`.
        """
        opening = self._begin(peer, adopted, alone=alone)
        return None if opening is None else Attempt(peer, opening)

    def _begin(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> Opening | None:
        self.refuse_if_many_hang()
        with self._lock:
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
        with self._lock:
            self._published.append(opening)
        log.warning("%d openings of %s lanes publish; each keeps a thread.", self.hung(), self._groups.name)

    def hung(self) -> int:
        """Openings that outlived their time and still run."""
        with self._lock:
            self._published = [thread for thread in self._published if thread.is_alive()]
            return len(self._published)

    def refuse_if_many_hang(self) -> None:
        """Raises LaneFailed: no more threads are given to openings."""
        if self.hung() >= MAX_HUNG:
            raise LaneFailed(f"{MAX_HUNG} openings of {self._groups.name} lanes publish here already.")

    def open(self, stores: tuple[PairStore, PairStore], rank: int, host: str) -> Lane:
        return Lane(self._groups, self._launches, stores, rank, host)


def lanes_for(choice: str, device: torch.device, *, required: bool = False) -> Lanes | None:
    """What ``--fabric-lane`` asks for. Raises ConfigError where this machine cannot do it."""
    groups = groups_for(choice, device)
    if groups is None:
        return None
    return Lanes(groups, required=required, least_bytes=FRAMES_BYTES if groups.name == "nccl" else 0)


class LaneServer(ServerExtension):
    """An expert server's lanes: each connection of an attention worker that offers the same may have one.

    Connections under TLS must not be given this: a lane is not encrypted.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._openings: dict[Peer, Opening | None] = {}
        """Of connections that may have a lane; None until the other end begins."""

    def offered(self, hello: Hello) -> Hello:
        return self._lanes.offered(hello)

    def opened(self, peer: Peer, theirs: Hello) -> None:
        if self._lanes.agreed(theirs, peer.name):
            self._openings[peer] = None

    def take(self, peer: Peer, frame: Frame) -> bool:
        if frame.kind != Kind.LANE or peer not in self._openings:
            return False
        opening = self._openings[peer] or self._lanes.welcome(peer)
        self._openings[peer] = opening
        opening.process(frame)
        return True

    def lost(self, peer: Peer) -> None:
        if (opening := self._openings.pop(peer, None)) is not None:
            opening.cancel()


def _next_frame(peer: Peer, until: float) -> Frame:
    try:
        return peer.receive(until)
    except SeatLost as error:
        if deadline_in(0) < until:
            raise
        raise LaneFailed(f"{peer.name} made no lane in time.") from error
