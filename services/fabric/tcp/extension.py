"""Extensions of the tcp fabric's connections, which carry more than calls. The tcp code knows them by this file alone.

:mod:`services.fabric.nccl` extends a connection by a transport for rows and by weights for workers that join,
:mod:`services.fabric.shared_memory` by steps through memory of the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from services.errors import LaneFailed
from services.fabric.tcp.frames import Frame
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Peer
from services.routing import Seat


class ConnectedSeat(Protocol):
    """An attention worker's end of one seat, as extensions see it."""

    @property
    def seat(self) -> Seat: ...

    @property
    def name(self) -> str: ...

    @property
    def usable(self) -> bool:
        """Whether the seat takes calls."""
        ...


class ClientExtension(Protocol):
    """An extension of an attention worker's connections, which then carry more than calls in frames.

    The thread of the seat's connection calls all methods; threads that hold the link's condition call ``busy``, too.
    """

    def opened(self, seat: ConnectedSeat, peer: Peer) -> None:
        """Begin to use the connection to ``seat``, which is proven."""
        ...

    def take(self, seat: ConnectedSeat, frame: Frame) -> bool:
        """Handle ``frame`` if it belongs to this extension; return whether it does."""
        ...

    def lost(self, seat: ConnectedSeat) -> None:
        """Use the connection no more: it has ended."""
        ...

    def carries(self, seat: ConnectedSeat, rows: int) -> bool:
        """Return whether calls of ``rows`` rows go by this extension, once it can carry them and while it works."""
        ...

    def busy(self, seat: ConnectedSeat) -> bool:
        """Return whether the connection is needed although no call is in flight."""
        ...


class ServerExtension:
    """An extension of an expert server's connections. This base class carries nothing but calls in frames.

    The thread of the connection calls ``opened``, ``take`` and ``lost``.
    """

    def offered(self, hello: Hello) -> Hello:
        """Return ``hello`` with what this extension offers to attention workers."""
        return hello

    def opened(self, peer: Peer, theirs: Hello) -> None:
        """Begin to use a proven connection; ``theirs`` is what the attention worker says of itself.

        Raises:
            ProtocolMismatch: the connection must end.
        """

    def take(self, peer: Peer, frame: Frame) -> bool:
        """Handle ``frame`` if it belongs to this extension; return whether it does.

        Raises:
            WireError: the frame belongs to it, but is malformed or out of place.
        """
        del peer, frame
        return False

    def lost(self, peer: Peer) -> None:
        """Use the connection no more: it has ended."""

    def wait_idle(self, seconds: float) -> bool:
        """Return whether all work for attention workers is done within ``seconds``."""
        del seconds
        return True

    def close(self) -> None:
        """Free what the extension holds: the server has ended all connections."""


class TransportAttempt(Protocol):
    """An attempt to open a transport for the rows of a connection, while calls go in frames."""

    def over(self, frame: Frame) -> bool:
        """Return whether rows go by the transport now. Each frame calls this, so at least every sign of life.

        Raises:
            LaneFailed: there will be no transport.
        """
        ...

    def give_up(self, error: LaneFailed) -> None:
        """Announce to the other end that no rows will come by a transport."""
        ...

    def cancel(self) -> None:
        """End the attempt because the connection has ended. A second call does nothing."""
        ...


class Transports(Protocol):
    """The transports for rows that one process can open."""

    @property
    def device(self) -> torch.device: ...

    @property
    def required(self) -> bool:
        """Whether seats without a transport are refused."""
        ...

    @property
    def least_bytes(self) -> int:
        """The number of bytes from which on rows go by the transport rather than in frames."""
        ...

    def offered(self, hello: Hello) -> Hello:
        """Return ``hello`` with the offer of a transport."""
        ...

    def agreed(self, theirs: Hello, name: str) -> bool:
        """Return whether the worker ``name``, which says ``theirs`` of itself, can have a transport with this process.

        Raises:
            ProtocolMismatch: a transport is required and not possible.
        """
        ...

    def approach(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> TransportAttempt | None:
        """Begin to open a transport, in the background; ``adopted`` is called when rows may go by it.

        With ``alone`` the result is None while another attempt is under way.

        Raises:
            LaneFailed: no more attempts are made in this process.
        """
        ...

    def join(self, peer: Peer) -> None:
        """Open a transport and wait for it, in the thread that receives.

        Raises:
            LaneFailed: there is no transport; the connection should end, as the other side may believe in one.
            SeatLeaving, SeatLost, WireError: the worker drains, the connection broke, or a frame is malformed.
        """
        ...

    def wait_ended(self, seconds: float = ...) -> bool:
        """Return whether all transports that were ended are gone within ``seconds``."""
        ...
