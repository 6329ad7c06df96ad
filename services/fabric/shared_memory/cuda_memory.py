"""Memory of a GPU that processes of the node share: the driver's virtual memory management, by ctypes.

Allocations have a handle that travels as a file descriptor and are counted by the driver: they outlive the process that
made them for as long as another one maps them. (CUDA's older IPC handles leave that undefined.)
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
from services.fabric.shared_memory.memory import NONCE_BYTES, Mapping, Region, Ticket, decode_ticket, wrong_memory

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
    """What torch takes memory by that others allocated."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaMemory:
    """Allocates on ``device`` and maps others' memory for it.

    ``aside``: memory is written and read beside the default stream, where a step may wait for what another thread of
    this process is yet to launch.

    Raises:
        FabricError: the driver is too old, or the GPU cannot share memory.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, *, aside: bool = False) -> None:
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
        self._aside = torch.cuda.Stream(self._device) if aside else None  # type: ignore[no-untyped-call]
        self._post = FdServer()
        self._uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, size: int) -> Region:
        self._enter()
        whole = -(-(size + NONCE_BYTES) // self._granularity) * self._granularity
        handle, fd = c_uint64(), c_int(-1)
        self._call("cuMemCreate", byref(handle), c_size_t(whole), byref(self._properties), c_uint64(0))
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _AS_FD, c_uint64(0))
        address = self._map(handle, whole)
        tensor: Tensor = torch.as_tensor(_Array(address, whole), device=self._device)
        nonce = secrets.token_bytes(NONCE_BYTES)
        with torch.cuda.stream(self._aside):
            tensor.zero_()
            tensor[size : size + NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).to(self._device)
            torch.cuda.current_stream(self._device).synchronize()
        key = self._post.publish(fd.value)

        def close() -> None:
            self._post.withdraw(key)
            os.close(fd.value)
            self._unmap(address, whole)

        ticket = Ticket(
            kind=self.kind, post=self._post.name, key=key, size=whole, nonce_at=size, nonce=nonce, device=self._uuid,
            process=os.getpid(),
        )  # fmt: skip
        return Region(tensor[:size], msgspec.msgpack.encode(ticket), close)

    def open(self, ticket: bytes) -> Mapping:
        facts = decode_ticket(ticket, self.kind)
        if facts.size % self._granularity or not 0 <= facts.nonce_at <= facts.size - NONCE_BYTES:
            raise wrong_memory(facts)
        if facts.device == self._uuid and facts.process != os.getpid():
            raise FabricError("The peer's memory is of this worker's own GPU, on which the two take turns.")
        self._enter()
        fd, handle = fetch_fd(facts.post, facts.key), c_uint64()
        try:
            self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _AS_FD)
        finally:
            os.close(fd)
        address = self._map(handle, facts.size)
        found = ctypes.create_string_buffer(NONCE_BYTES)
        read: tuple[Any, ...] = (found, c_uint64(address + facts.nonce_at), c_size_t(NONCE_BYTES))
        if self._aside is None:
            self._call("cuMemcpyDtoH_v2", *read)
        else:
            self._call("cuMemcpyDtoHAsync_v2", *read, c_void_p(self._aside.cuda_stream))
            self._aside.synchronize()
        if found.raw != facts.nonce:
            self._unmap(address, facts.size)
            raise wrong_memory(facts)
        return Mapping(
            address, lambda: self._unmap(address, facts.size), facts.device, own=facts.process == os.getpid()
        )

    def close(self) -> None:
        self._post.close()

    def _map(self, handle: c_uint64, size: int) -> int:
        """The memory lives on in its mappings: the handle is given back."""
        address, access = c_uint64(), _Access(self._location, _READ_WRITE)
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self._call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        self._call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        self._call("cuMemRelease", handle)
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
