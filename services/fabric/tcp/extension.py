"""What the connections of the tcp fabric carry for others: this file is all that the tcp code knows of them.

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
    """An attention worker's end of a seat, as extensions see it."""

    @property
    def seat(self) -> Seat: ...

    @property
    def name(self) -> str: ...

    @property
    def usable(self) -> bool:
        """Whether the seat takes calls."""
        ...


class ClientExtension(Protocol):
    """What an attention worker's connections carry besides calls in frames.

    All methods are called in the thread of the seat's connection; ``busy`` is also called by threads that hold the
    link's condition.
    """

    def opened(self, seat: ConnectedSeat, peer: Peer) -> None:
        """The connection to ``seat`` is proven."""
        ...

    def take(self, seat: ConnectedSeat, frame: Frame) -> bool:
        """Whether ``frame`` belongs to this extension, which has handled it then."""
        ...

    def lost(self, seat: ConnectedSeat) -> None:
        """The connection has ended."""
        ...

    def carries(self, seat: ConnectedSeat, rows: int) -> bool:
        """Whether calls of so many rows go by this extension, once it can carry them and as long as it works."""
        ...

    def busy(self, seat: ConnectedSeat) -> bool:
        """Whether the connection is needed although no call is in flight."""
        ...


class ServerExtension:
    """What an expert server's connections carry besides calls in frames. This base class carries nothing.

    ``opened``, ``take`` and ``lost`` are called in the thread of the connection.
    """

    def offered(self, hello: Hello) -> Hello:
        """``hello`` with what this extension offers to attention workers."""
        return hello

    def opened(self, peer: Peer, theirs: Hello) -> None:
        """An attention worker that says ``theirs`` of itself has proven its connection.

        Raises:
            ProtocolMismatch: the connection must end.
        """

    def take(self, peer: Peer, frame: Frame) -> bool:
        """Whether ``frame`` belongs to this extension, which has handled it then.

        Raises:
            WireError: it does, but is malformed or out of place.
        """
        del peer, frame
        return False

    def lost(self, peer: Peer) -> None:
        """The connection has ended."""

    def wait_idle(self, seconds: float) -> bool:
        """Whether all work for attention workers is done within ``seconds``."""
        del seconds
        return True

    def close(self) -> None:
        """The server has ended all connections."""


class TransportAttempt(Protocol):
    """An attempt to open a transport for the rows of a connection, while calls go in frames."""

    def over(self, frame: Frame) -> bool:
        """Whether rows go by the transport now. Called with each frame, so at least as often as signs of life.

        Raises:
            LaneFailed: there will be no transport.
        """
        ...

    def give_up(self, error: LaneFailed) -> None:
        """Tell the other end that no rows will come by a transport."""
        ...

    def cancel(self) -> None:
        """The connection has ended. Calling it twice does no harm."""
        ...


class Transports(Protocol):
    """What one process knows about transports for rows."""

    @property
    def device(self) -> torch.device: ...

    @property
    def required(self) -> bool:
        """Whether seats without a transport are refused."""
        ...

    @property
    def least_bytes(self) -> int:
        """From how many bytes on rows go by the transport rather than in frames."""
        ...

    def offered(self, hello: Hello) -> Hello:
        """``hello`` with the offer of a transport."""
        ...

    def agreed(self, theirs: Hello, name: str) -> bool:
        """Whether the worker ``name``, which says ``theirs`` of itself, can have a transport with this one.

        Raises:
            ProtocolMismatch: a transport is required and cannot be.
        """
        ...

    def approach(self, peer: Peer, adopted: Callable[[], None], *, alone: bool = False) -> TransportAttempt | None:
        """Begin to open a transport; ``adopted`` is called when rows go by it.

        Returns:
            None where the attempt has to be ``alone`` and another one is under way.

        Raises:
            LaneFailed: no more attempts are made in this process.
        """
        ...

    def join(self, peer: Peer) -> None:
        """Open a transport and wait until it is there, in the thread that receives.

        Raises:
            LaneFailed: there will be none; the connection should end.
        """
        ...

    def wait_ended(self, seconds: float = ...) -> bool:
        """Whether transports that were ended are gone within ``seconds``."""
        ...
