"""The calls that a link has sent over the connection to a seat."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from services.errors import ExpertMeshError
from services.fabric.tcp.extension import TransportAttempt, Transports
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer
from services.fabric.tcp.transport import Shipment


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One sending of some rows to one replica. ``outcome`` is set once, under the link's condition."""

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
    lane_from: tuple[Transports, float] | None = None
    """A lane may be opened, from this monotonic time on, if it is wanted."""
    lane_wanted: bool = True
    attempt: TransportAttempt | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    lost: dict[int, Call] = field(default_factory=dict)
    """Calls that it took with it: their rows may be in the sender's hands until the connection is closed."""
