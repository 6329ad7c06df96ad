"""Memory of the host that processes of a node share: anonymous files, handed over as descriptors."""

from __future__ import annotations

import os
import secrets
from typing import Final

import msgspec
import torch
from torch import Tensor

from services.fabric.shared_memory.fd_server import FdServer, fetch_fd
from services.fabric.shared_memory.memory import (
    NONCE_BYTES,
    MemoryHandle,
    PeerMapping,
    Region,
    decode_handle,
    wrong_memory,
)


class HostMemory:
    """A :class:`services.fabric.shared_memory.memory.PeerMemory` of anonymous files."""

    kind: Final = "host"

    def __init__(self) -> None:
        self._fd_server = FdServer()

    def share(self, size: int) -> Region:
        fd, whole = os.memfd_create("expertmesh"), size + NONCE_BYTES
        os.ftruncate(fd, whole)
        nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, size)
        key = self._fd_server.publish(fd)
        handle = MemoryHandle(
            kind=self.kind, server=self._fd_server.name, key=key, size=whole, nonce_at=size, nonce=nonce
        )

        def close() -> None:
            self._fd_server.withdraw(key)
            os.close(fd)

        return Region(_mapped(fd, whole)[:size], msgspec.msgpack.encode(handle), close)

    def open(self, handle: bytes) -> PeerMapping:
        facts = decode_handle(handle, self.kind)
        fd = fetch_fd(facts.server, facts.key)
        try:
            if (
                facts.nonce_at + NONCE_BYTES > facts.size
                or os.fstat(fd).st_size != facts.size
                or os.pread(fd, NONCE_BYTES, facts.nonce_at) != facts.nonce
            ):
                raise wrong_memory(facts)
            tensor = _mapped(fd, facts.size)
        except (OSError, RuntimeError) as error:  # the server sent a descriptor of something else than memory
            raise wrong_memory(facts) from error
        finally:
            os.close(fd)
        held = [tensor]
        return PeerMapping(tensor.data_ptr(), held.clear)

    def close(self) -> None:
        self._fd_server.close()


def _mapped(fd: int, size: int) -> Tensor:
    """Map ``size`` bytes, uint8; the mapping lives as long as the tensor and needs no descriptor (that of mmap would
    keep one)."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
