"""Memory that one process allocates and others of the node write into: ``share`` gives a ticket, ``open`` an address.

It lives as long as anybody maps it, so a put into memory of a dead process, or of one that has let go of it, is lost
and harms nobody. A ticket proves itself: who opens it finds the ticket's nonce there.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Annotated, Final, Protocol

import msgspec
import torch
from torch import Tensor

from services.errors import ConfigError, FabricError
from services.fabric.shared_memory.fd_server import FdPost, fetch_fd
from services.fabric.tcp.frames import decoded

log = logging.getLogger(__name__)

NONCE_BYTES = 32
_MOST_BYTES = 1 << 46
"""An address has no more bits."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``size``: bytes to map. The nonce lies at ``nonce_at``. ``device`` and ``process``: whose memory it is."""

    kind: str
    post: str
    key: bytes
    size: Annotated[int, msgspec.Meta(gt=0, le=_MOST_BYTES)]
    nonce_at: Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
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


class HostMemory:
    """Memory of the host, as anonymous files."""

    kind: Final = "host"

    def __init__(self) -> None:
        self._post = FdPost()

    def share(self, size: int) -> Region:
        fd = os.memfd_create("expertmesh")
        os.ftruncate(fd, size + NONCE_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, size)
        key = self._post.hang(fd)
        ticket = Ticket(
            kind=self.kind, post=self._post.name, key=key, size=size + NONCE_BYTES, nonce_at=size, nonce=nonce
        )

        def close() -> None:
            self._post.take_down(key)
            os.close(fd)

        return Region(_mapped(fd, size + NONCE_BYTES)[:size], msgspec.msgpack.encode(ticket), close)

    def open(self, ticket: bytes) -> Mapping:
        facts = decode_ticket(ticket, self.kind)
        fd = fetch_fd(facts.post, facts.key)
        try:
            if (
                facts.nonce_at + NONCE_BYTES > facts.size
                or os.fstat(fd).st_size != facts.size
                or os.pread(fd, NONCE_BYTES, facts.nonce_at) != facts.nonce
            ):
                raise wrong_memory(facts)
            tensor = _mapped(fd, facts.size)
        except (OSError, RuntimeError) as error:  # what came from the post is no memory
            raise wrong_memory(facts) from error
        finally:
            os.close(fd)
        held = [tensor]
        return Mapping(tensor.data_ptr(), held.clear)

    def close(self) -> None:
        self._post.close()


def decode_ticket(ticket: bytes, kind: str) -> Ticket:
    """Raises WireError where it is none, FabricError where it is for another kind of memory."""
    facts = decoded(ticket, Ticket, "a ticket to memory")
    if facts.kind != kind:
        raise FabricError(f"The peer's memory is of the kind {facts.kind!r}, not {kind!r}: rows go over tcp.")
    return facts


def wrong_memory(ticket: Ticket) -> FabricError:
    return FabricError(f"The memory that {ticket.post} gave out is not what the ticket is for.")


def memory_for(choice: str, device: torch.device, *, aside: bool = False) -> PeerMemory | None:
    """What ``--fabric-shared`` asks for; None where there is nothing to share, or (``auto``) it cannot be.

    ``aside``: while kernels of this process wait for one another, see
    :class:`services.fabric.shared_memory.cuda_memory.CudaMemory`.

    Raises:
        ConfigError: ``host`` beside a GPU.
    """
    if choice == "off":
        return None
    if choice == "host":
        if device.type != "cpu":
            raise ConfigError("--fabric-shared host needs --device cpu.", hint="Choose auto or off.")
        return HostMemory()
    # Workers that share one GPU take turns on it: waiting for each other inside a step would last a turn each time.
    # One that has attention and a seat in one process does not.
    if device.type != "cuda" or (torch.cuda.device_count() < 2 and not aside):
        return None
    from services.fabric.shared_memory.cuda_memory import CudaMemory  # looks for the driver

    try:
        return CudaMemory(device, aside=aside)
    except FabricError as error:
        log.warning("Rows do not go through shared memory: %s", error)
        return None


def _mapped(fd: int, size: int) -> Tensor:
    """The mapping lives as long as the tensor does, and needs no descriptor (that of mmap would keep one)."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
