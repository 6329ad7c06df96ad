"""Memory of a GPU that processes of the node share, by the driver's virtual memory management and ctypes.

The driver exports an allocation as a file descriptor and counts who maps it: the memory outlives the process that
allocated it for as long as a peer maps it. (CUDA's older IPC handles leave that undefined.)
"""

from __future__ import annotations

import ctypes
import os
import secrets
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from services.errors import FabricError
from services.fabric.shared_memory.fd_server import FdServer, fetch_fd
from services.fabric.shared_memory.memory import (
    NONCE_BYTES,
    MemoryHandle,
    PeerMapping,
    Region,
    decode_handle,
    wrong_memory,
)

_PINNED: Final = 1
_ON_DEVICE: Final = 1
_AS_FD: Final = 1
_READ_WRITE: Final = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class _Array:
    """Memory that the driver allocated, as torch takes it: by ``__cuda_array_interface__``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaMemory:
    """A :class:`services.fabric.shared_memory.memory.PeerMemory` of the GPU ``device``.

    Args:
        on_side_stream: read and write on a stream of its own; a step on the default stream may wait for a kernel that
            another thread of this process has not launched yet.

    Raises:
        FabricError: the driver is too old, or the GPU cannot share memory.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, *, on_side_stream: bool = False) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise FabricError(f"The GPU's driver cannot be reached: {error}.") from error
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(_PINNED, _AS_FD, self._location)
        self._context = c_void_p()
        number = c_int()
        self._call("cuDeviceGet", byref(number), index)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), number)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
        self._granularity = granularity.value
        self._side_stream = torch.cuda.Stream(self._device) if on_side_stream else None  # type: ignore[no-untyped-call]
        self._fd_server = FdServer()
        self._uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, size: int) -> Region:
        self._enter()
        whole = -(-(size + NONCE_BYTES) // self._granularity) * self._granularity
        allocation, fd = c_uint64(), c_int(-1)
        self._call("cuMemCreate", byref(allocation), c_size_t(whole), byref(self._properties), c_uint64(0))
        self._call("cuMemExportToShareableHandle", byref(fd), allocation, _AS_FD, c_uint64(0))
        address = self._map(allocation, whole)
        tensor: Tensor = torch.as_tensor(_Array(address, whole), device=self._device)
        nonce = secrets.token_bytes(NONCE_BYTES)
        with torch.cuda.stream(self._side_stream):
            tensor.zero_()
            tensor[size : size + NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).to(self._device)
            torch.cuda.current_stream(self._device).synchronize()
        key = self._fd_server.publish(fd.value)

        def close() -> None:
            self._fd_server.withdraw(key)
            os.close(fd.value)
            self._unmap(address, whole)

        handle = MemoryHandle(
            kind=self.kind, server=self._fd_server.name, key=key, size=whole, nonce_at=size, nonce=nonce,
            device=self._uuid, process=os.getpid(),
        )  # fmt: skip
        return Region(tensor[:size], msgspec.msgpack.encode(handle), close)

    def open(self, handle: bytes) -> PeerMapping:
        facts = decode_handle(handle, self.kind)
        if facts.size % self._granularity or not 0 <= facts.nonce_at <= facts.size - NONCE_BYTES:
            raise wrong_memory(facts)
        if facts.device == self._uuid and facts.process != os.getpid():
            raise FabricError("The peer is on this worker's own GPU, where the two run alternately.")
        self._enter()
        fd, allocation = fetch_fd(facts.server, facts.key), c_uint64()
        try:
            self._call("cuMemImportFromShareableHandle", byref(allocation), c_void_p(fd), _AS_FD)
        finally:
            os.close(fd)
        address = self._map(allocation, facts.size)
        found = ctypes.create_string_buffer(NONCE_BYTES)
        read: tuple[Any, ...] = (found, c_uint64(address + facts.nonce_at), c_size_t(NONCE_BYTES))
        if self._side_stream is None:
            self._call("cuMemcpyDtoH_v2", *read)
        else:
            self._call("cuMemcpyDtoHAsync_v2", *read, c_void_p(self._side_stream.cuda_stream))
            self._side_stream.synchronize()
        if found.raw != facts.nonce:
            self._unmap(address, facts.size)
            raise wrong_memory(facts)
        own = facts.process == os.getpid()
        return PeerMapping(address, lambda: self._unmap(address, facts.size), facts.device, own=own)

    def close(self) -> None:
        self._fd_server.close()

    def _map(self, allocation: c_uint64, size: int) -> int:
        """Return the address of a new mapping, which keeps the memory: ``allocation`` itself is released."""
        address, access = c_uint64(), _Access(self._location, _READ_WRITE)
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self._call("cuMemMap", address, c_size_t(size), c_size_t(0), allocation, c_uint64(0))
        self._call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        self._call("cuMemRelease", allocation)
        return address.value

    def _unmap(self, address: int, size: int) -> None:
        self._enter()
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, byref(text))
            reason = (text.value or b"").decode() or f"error {code}"
            raise FabricError(f"{name} failed: {reason}.", hint="Are all GPUs of the node visible to all workers?")
