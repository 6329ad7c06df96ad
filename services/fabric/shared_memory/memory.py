"""Memory that one process allocates and others of its node write into: ``share`` gives a handle, ``open`` an address.

The memory lives as long as any process maps it, so that a put into memory of a dead process, or of one that has closed
it, is lost and harms nobody. A nonce in the memory proves that a handle belongs to it.
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


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Names memory of one process for others of its node: ``size`` bytes, with a nonce at the offset ``nonce_at``.

    The :class:`~services.fabric.shared_memory.fd_server.FdServer` named ``server`` gives out its descriptor under
    ``key``. Memory of a GPU also has the UUID of that ``device`` and the id of the ``process`` that allocated it.
    """

    kind: str
    server: str
    key: bytes
    size: Annotated[int, msgspec.Meta(gt=0, le=_MAX_BYTES)]
    nonce_at: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    device: str = ""
    process: int = 0


class _Held:
    """Memory that this process holds until :meth:`close`."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Give the memory back. No kernel and no tensor may use it any more; a second call does nothing."""
        if self._close is not None:
            self._close()
            self._close = None


class PeerMemory(Protocol):
    """A way to share memory of one device; instances of one ``kind`` can open each other's memory."""

    @property
    def kind(self) -> str: ...

    def share(self, size: int) -> Region:
        """Allocate ``size`` zeroed bytes that other processes of the node may map.

        Raises:
            FabricError: the driver gives no such memory.
        """
        ...

    def open(self, handle: bytes) -> PeerMapping:
        """Map the memory that the encoded ``handle`` names.

        Raises:
            FabricError: the memory is out of reach, or is not the memory that ``handle`` was made for.
            WireError: ``handle`` cannot be decoded.
        """
        ...

    def close(self) -> None:
        """Give out no more descriptors; memory that is mapped stays mapped."""
        ...


class PeerMapping(_Held):
    """Memory of a peer, mapped at ``address``. ``own`` says that this very process allocated it, on ``device``."""

    def __init__(self, address: int, close: Callable[[], None], device: str = "", *, own: bool = False) -> None:
        super().__init__(close)
        self.address, self.device, self.own = address, device, own


class Region(_Held):
    """Memory of this process that peers may map: ``bytes``, uint8 and 256-byte aligned, and its encoded ``handle``."""

    def __init__(self, tensor: Tensor, handle: bytes, close: Callable[[], None]) -> None:
        super().__init__(close)
        self.bytes, self.handle = tensor, handle


def decode_handle(handle: bytes, kind: str) -> MemoryHandle:
    """Decode ``handle``.

    Raises:
        WireError: these bytes are no handle.
        FabricError: the handle names memory of another kind than ``kind``.
    """
    facts = decoded(handle, MemoryHandle, "a memory handle")
    if facts.kind != kind:
        raise FabricError(f"The peer's memory is of kind {facts.kind!r}, not {kind!r}.")
    return facts


def wrong_memory(handle: MemoryHandle) -> FabricError:
    """Return the error to raise where memory has another nonce or size than its handle says."""
    return FabricError(f"The memory from {handle.server} does not belong to its handle.")
