"""A process that maps memory of a GPU which another process allocated, and reads it when its owner has closed it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import Tensor

from services.errors import FabricError
from services.fabric.shared_memory.cuda_memory import CudaMemory, _Array
from services.fabric.shared_memory.memory import MemoryHandle

GPU = torch.device("cuda", 0)
SIZE = 3 << 20


def changed(handle: bytes, **facts: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(handle, type=MemoryHandle), **facts))


def mapped(address: int) -> Tensor:
    return torch.as_tensor(_Array(address, SIZE), device=GPU)


def numbers(first: int) -> Tensor:
    return torch.arange(first, first + 8, dtype=torch.uint8, device=GPU)


def neighbour(pipe: Connection, handle: bytes) -> None:
    """Report the refusal of memory of the same GPU. Then open it as if it was another GPU's, and read and write."""
    memory, refused = CudaMemory(GPU, on_side_stream=True), ""
    try:
        memory.open(handle)
    except FabricError as error:
        refused = str(error)
    mapping = memory.open(changed(handle, device=""))
    theirs = mapped(mapping.address)
    seen = theirs[:8].tolist()
    theirs[-8:] = numbers(100)
    torch.cuda.synchronize()
    pipe.send((refused, seen, mapping.own))
    pipe.recv()  # the owner has closed it
    pipe.send(theirs[:8].tolist())
    mapping.close()
    memory.close()
