"""CUDA's older IPC handles behind the same seam, to compare with: they travel as 64 bytes, without a descriptor."""

from __future__ import annotations

import ctypes
import secrets
from ctypes import byref, c_size_t, c_uint64
from typing import Any

import msgspec
import torch

from services.fabric.shared_memory.cuda_memory import CudaMemory, _Array
from services.fabric.shared_memory.memory import (
    NONCE_BYTES,
    MemoryHandle,
    PeerMapping,
    Region,
    decode_handle,
    wrong_memory,
)


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 64),)


class IpcMemory(CudaMemory):
    kind = "ipc"

    def share(self, size: int) -> Region:
        self._enter()
        whole = -(-(size + NONCE_BYTES) // (2 << 20)) * (2 << 20)
        address, exported = c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(whole))
        self._call("cuIpcGetMemHandle", byref(exported), address)
        tensor = torch.as_tensor(_Array(address.value, whole), device=self._device)
        nonce = secrets.token_bytes(NONCE_BYTES)
        tensor.zero_()
        tensor[size : size + NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).to(self._device)
        torch.cuda.current_stream(self._device).synchronize()
        handle = MemoryHandle(kind=self.kind, server="", key=bytes(exported), size=whole, nonce_at=size, nonce=nonce)
        return Region(tensor[:size], msgspec.msgpack.encode(handle), lambda: None)

    def open(self, handle: bytes) -> PeerMapping:
        facts = decode_handle(handle, self.kind)
        self._enter()
        address, exported = c_uint64(), _Handle.from_buffer_copy(facts.key)
        self._call("cuIpcOpenMemHandle_v2", byref(address), exported, 1)
        found = ctypes.create_string_buffer(NONCE_BYTES)
        self._call("cuMemcpyDtoH_v2", found, c_uint64(address.value + facts.nonce_at), c_size_t(NONCE_BYTES))
        if found.raw != facts.nonce:
            raise wrong_memory(facts)
        return PeerMapping(address.value, lambda: self._call("cuIpcCloseMemHandle", address))


def memory_by(name: str, device: torch.device) -> Any:
    """``vmm``, what the link uses, or ``ipc``."""
    from services.fabric.shared_memory.cuda_memory import CudaMemory
    from services.fabric.shared_memory.host_memory import HostMemory

    if device.type != "cuda":
        return HostMemory()
    return IpcMemory(device) if name == "ipc" else CudaMemory(device)
