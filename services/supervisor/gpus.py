"""Which GPUs torch would find here, without the seconds that importing torch takes: from the driver itself."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from services.errors import WorkerExtraMissing

_NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """``names`` of the GPUs that this process may use, and the bytes of their memory, if known; ``missing`` says why
    there are none. With neither names nor that, only torch knows."""

    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    missing: str | None = None


def find_gpus() -> Gpus:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or of the machine. Raises WorkerExtraMissing where there is no torch."""
    built = _torch_version_file()
    if re.search(r"^hip\b.*=\s*['\"]", built, re.MULTILINE):
        return Gpus()
    if re.search(r"^cuda\b.*=\s*None", built, re.MULTILINE):
        return Gpus(missing="the torch that is installed is built without CUDA")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus(missing="no driver of NVIDIA is installed")
    return _listed(driver)


def _listed(driver: ctypes.CDLL) -> Gpus:
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Gpus(missing="the driver finds no GPU")
    numbers = range(count.value)
    memory = tuple(size for number in numbers if (size := _memory(driver, number)))
    return Gpus(
        names=tuple(_name(driver, number) for number in numbers), memory=memory if len(memory) == len(numbers) else ()
    )


def _name(driver: ctypes.CDLL, number: int) -> str:
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(_NAME_BYTES)
    if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetName(name, _NAME_BYTES, device):
        return "GPU"
    return name.value.decode(errors="replace")


def _memory(driver: ctypes.CDLL, number: int) -> int:
    """Return the bytes of a GPU's memory, 0 where the driver does not know it."""
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return 0
    return size.value


def _torch_version_file() -> str:
    """Return the text of torch's version.py, which names what torch was built for; empty if it is not found."""
    found = importlib.util.find_spec("torch")
    if found is None:
        raise WorkerExtraMissing("torch")
    if found.origin is None:
        return ""
    file = Path(found.origin).with_name("version.py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""
