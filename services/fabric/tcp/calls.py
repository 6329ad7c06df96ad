"""What a seat's connection carries for others: the calls of a link, and whoever rides along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from services.errors import ExpertMeshError
from services.fabric.nccl.lane import Shipment
from services.fabric.nccl.lanes import Attempt, Lanes
from services.fabric.tcp.frames import Frame
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer

if TYPE_CHECKING:
    from services.fabric.tcp.connection import SeatLink


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One sending of some rows to one replica. ``outcome`` is set once, under the link's condition."""

    seat: SeatLink
    connection: int
    rows: int
    answer_rows: int
    deadline: float
    outcome: Tensor | ExpertMeshError | None = None
    finite: bool = True
    abandoned: bool = False
    shipment: Shipment | None = None


@dataclass(slots=True)
class Connection:
    peer: Peer
    theirs: Hello
    lane_from: tuple[Lanes, float] | None = None
    """A lane may be opened, from this monotonic time on, if it is wanted."""
    lane_wanted: bool = True
    attempt: Attempt | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    lost: dict[int, Call] = field(default_factory=dict)
    """Calls that it took with it: their rows may be in the sender's hands until the connection is closed."""


class Rider(Protocol):
    """What else goes over a seat's connection. Called in the seat's thread, ``busy`` under the link's condition."""

    def opened(self, seat: SeatLink, peer: Peer) -> None: ...

    def take(self, seat: SeatLink, frame: Frame) -> bool:
        """Whether the frame was for it."""
        ...

    def lost(self, seat: SeatLink) -> None: ...

    def carries(self, seat: SeatLink, rows: int) -> bool:
        """Whether calls of so many rows are to go by it, once it can and as long as it works."""
        ...

    def busy(self, seat: SeatLink) -> bool:
        """Whether the connection is needed although no call is in flight."""
        ...
