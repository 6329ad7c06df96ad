"""Memory of the host that processes of a node share: anonymous files, handed over as descriptors."""

from __future__ import annotations

import os
import secrets
from typing import Final

import msgspec
import torch
from torch import Tensor

from services.fabric.shared_memory.fd_server import FdServer, fetch_fd
from services.fabric.shared_memory.memory import NONCE_BYTES, Mapping, Region, Ticket, decode_ticket, wrong_memory


class HostMemory:
    """Memory of the host, as anonymous files."""

    kind: Final = "host"

    def __init__(self) -> None:
        self._post = FdServer()

    def share(self, size: int) -> Region:
        fd = os.memfd_create("expertmesh")
        os.ftruncate(fd, size + NONCE_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, size)
        key = self._post.publish(fd)
        ticket = Ticket(
            kind=self.kind, post=self._post.name, key=key, size=size + NONCE_BYTES, nonce_at=size, nonce=nonce
        )

        def close() -> None:
            self._post.withdraw(key)
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


def _mapped(fd: int, size: int) -> Tensor:
    """The mapping lives as long as the tensor does, and needs no descriptor (that of mmap would keep one)."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
