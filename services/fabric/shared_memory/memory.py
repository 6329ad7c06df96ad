"""Memory that one process allocates and others of the node write into: ``share`` gives a ticket, ``open`` an address.

It lives as long as anybody maps it, so a put into memory of a dead process, or of one that has let go of it, is lost
and harms nobody. A ticket proves itself: who opens it finds the ticket's nonce there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
from torch import Tensor

from services.errors import FabricError
from services.fabric.tcp.frames import decoded

log = logging.getLogger(__name__)

NONCE_BYTES = 32
_MAX_BYTES = 1 << 46
"""An address has no more bits."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``size``: bytes to map. The nonce lies at ``nonce_at``. ``device`` and ``process``: whose memory it is."""

    kind: str
    post: str
    key: bytes
    size: Annotated[int, msgspec.Meta(gt=0, le=_MAX_BYTES)]
    nonce_at: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    device: str = ""
    process: int = 0


class Mapping:
    """Memory of a peer, at ``address`` in this process until :meth:`close`. ``device``: as :class:`Ticket` names it;
    ``own``: it is of this very process."""

    def __init__(self, address: int, close: Callable[[], None], device: str = "", *, own: bool = False) -> None:
        self.address, self.device, self.own = address, device, own
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """No kernel may still use it."""
        if self._close is not None:
            self._close()
            self._close = None


class Region:
    """Own memory, zeroed: ``bytes``, uint8 and 256-byte aligned, and the encoded ticket to it."""

    def __init__(self, tensor: Tensor, ticket: bytes, close: Callable[[], None]) -> None:
        self.bytes = tensor
        self.ticket = ticket
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """This process lets go of it; the tensor must not be used any more."""
        if self._close is not None:
            self._close()
            self._close = None


class PeerMemory(Protocol):
    """A way to share memory of one device; those of one ``kind`` can open each other's."""

    @property
    def kind(self) -> str: ...

    def share(self, size: int) -> Region: ...

    def open(self, ticket: bytes) -> Mapping:
        """
        Raises:
            FabricError: the memory is out of reach, or it is another one.
            WireError: this is no ticket.
        """
        ...

    def close(self) -> None:
        """Give out no more of it; what is mapped stays."""
        ...


def decode_ticket(ticket: bytes, kind: str) -> Ticket:
    """Raises WireError where it is none, FabricError where it is for another kind of memory."""
    facts = decoded(ticket, Ticket, "a ticket to memory")
    if facts.kind != kind:
        raise FabricError(f"The peer's memory is of the kind {facts.kind!r}, not {kind!r}: rows go over tcp.")
    return facts


def wrong_memory(ticket: Ticket) -> FabricError:
    return FabricError(f"The memory that {ticket.post} gave out is not what the ticket is for.")
