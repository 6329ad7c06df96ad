"""The lanes of a process: whether two ends can have a lane, how many are opened at a time, and when they have ended.

:mod:`services.fabric.nccl.opening` opens one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from services.errors import ConfigError, LaneFailed, ProtocolMismatch, SeatLeaving, SeatLost
from services.fabric.nccl.lane import ATTENTION, EXPERTS, Lane, Launches
from services.fabric.nccl.opening import Opening
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Groups, NcclGroups
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import Frame, Kind
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer, deadline_in

log = logging.getLogger(__name__)

OPENING_S = 30.0
"""Longest time from two offers to a lane; NCCL takes a second, more where a GPU is new to the process."""
ENDING_S = 2.0
_KIND = "/2"
"""Version of a lane's use, which an offer names: ends with different versions open no lane. With version 1 all rows
went by the lane once it was open."""
FRAMES_BYTES = 96 << 10
"""Fewer bytes arrive sooner in frames than over NCCL, which needs both hosts as well (docs/adr/0006)."""
MAX_STUCK = 4
"""Number of stuck openings in one process from which on it opens no more lanes."""


class Lanes:
    """Opens lanes for the connections of one process. Give each device one instance.

    It implements :class:`services.fabric.tcp.extension.Transports`.

    Args:
        required: refuse seats that can have no lane.
        opening_s: longest time for opening a lane.
        least_bytes: rows of a call, or of its answer, go by the lane from this number of bytes on.
    """

    def __init__(
        self, groups: Groups, *, required: bool = False, opening_s: float = OPENING_S, least_bytes: int = 0
    ) -> None:
        self._groups, self._opening_s = groups, opening_s
        self.device, self.required, self.least_bytes = groups.device, required, least_bytes
        self._offer = f"{groups.name}{_KIND}"
        self._launches = Launches()
        self._lock = threading.Lock()
        self._stuck: list[threading.Thread] = []
        self._approaching: list[Opening] = []

    def offered(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, lane=self._offer, device=self._groups.identity())

    def agreed(self, theirs: Hello, name: str) -> bool:
        """Return whether ``theirs`` offers the same kind of lane on another GPU: two ends on one GPU can have none.

        Raises:
            ProtocolMismatch: a lane is required and not possible.
        """
        same = theirs.lane == self._offer and (not theirs.device or theirs.device != self._groups.identity())
        if self.required and not same:
            raise ProtocolMismatch(
                f"There can be no {self._groups.name} lane to {name}: it offers {theirs.lane or 'none'}"
                f"{', on the same device' if theirs.lane == self._offer else ''}.",
                hint="Start it with the same --fabric-lane, or both with auto.",
            )
        return same

    def join(self, peer: Peer) -> None:
        until = deadline_in(self._opening_s)
        opening = self.approach(peer, lambda: None)
        assert opening is not None, "it may open next to others"
        try:
            while not opening.take(frame := _next_frame(peer, until)):
                if frame.kind == Kind.LEAVING:
                    raise SeatLeaving(f"{peer.name} is leaving.", hint="The routing table will follow.")
            opening.wait()
        except BaseException:
            opening.cancel()
            raise

    def welcome(self, peer: Peer) -> Opening:
        """Begin the expert side's part, in the background; :meth:`Opening.process` takes frames of kind LANE."""
        return Opening(self, peer, EXPERTS, self._opening_s)

    def approach(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> Opening | None:
        self.refuse_if_many_stuck()
        with self._lock:
            under_way = [other for other in self._approaching if other.under_way]
            if alone and under_way:
                return None
            opening = Opening(self, peer, ATTENTION, self._opening_s, adopted)
            self._approaching = [*under_way, opening]
        return opening

    def wait_ended(self, seconds: float = ENDING_S) -> bool:
        return self._launches.wait_ended(seconds)

    def note_stuck(self, opening: threading.Thread) -> None:
        with self._lock:
            self._stuck.append(opening)
        log.warning("%d attempts to open a %s lane are stuck; each keeps a thread", self.stuck(), self._groups.name)

    def stuck(self) -> int:
        """Return how many openings were given up and still run."""
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            return len(self._stuck)

    def refuse_if_many_stuck(self) -> None:
        if self.stuck() >= MAX_STUCK:
            raise LaneFailed(f"{MAX_STUCK} attempts to open a {self._groups.name} lane are already stuck here.")

    def open(self, stores: tuple[PairStore, PairStore], rank: int, host: str) -> Lane:
        return Lane(self._groups, self._launches, stores, rank, host)


def lanes_for(choice: str, device: torch.device, *, required: bool = False) -> Lanes | None:
    """Return the lanes that ``--fabric-lane`` asks for: ``nccl``, ``auto`` (on GPUs) or ``tcp``, which is None.

    Raises:
        ConfigError: ``nccl`` was chosen, and there is no GPU or torch has no NCCL.
    """
    on_gpu = device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
    if choice == "nccl" and not on_gpu:
        raise ConfigError("--fabric-lane nccl needs a GPU and a torch with NCCL.", hint="Choose auto or tcp.")
    if choice == "tcp" or not on_gpu:
        return None
    return Lanes(NcclGroups(device), required=required, least_bytes=FRAMES_BYTES)


class LaneServer(ServerExtension):
    """Opens lanes at an expert server, for connections of attention workers that offer the same kind.

    Do not use it for connections under TLS: a lane is not encrypted.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._openings: dict[Peer, Opening | None] = {}
        """Connections that may have a lane; the opening is None until the other end begins."""

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
        raise LaneFailed(f"{peer.name} did not open its lane in time.") from error
