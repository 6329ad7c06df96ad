"""Calls in flight over an attention worker's connection to a seat."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from services.errors import ExpertMeshError
from services.fabric.tcp.extension import TransportAttempt, Transports
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """Rows sent once to one replica, over the seat's connection with this number.

    ``outcome`` is the answer or an error, set once under the link's condition; ``finite`` says that the answer has
    neither NaN nor infinity. ``deadline`` is a time of the monotonic clock.
    """

    connection: int
    rows: int
    answer_rows: int
    deadline: float
    outcome: Tensor | ExpertMeshError | None = None
    finite: bool = True
    abandoned: bool = False
    shipment: object | None = None


@dataclass(slots=True)
class Connection:
    """A proven connection to a seat, and what is known of its lane."""

    peer: Peer
    theirs: Hello
    lane_from: tuple[Transports, float] | None = None
    """A lane may be opened from this time of the monotonic clock on, if ``lane_wanted``."""
    lane_wanted: bool = True
    attempt: TransportAttempt | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    lost: dict[int, Call] = field(default_factory=dict)
    """Calls that failed with the connection: its sender may still read their rows until it is closed."""
