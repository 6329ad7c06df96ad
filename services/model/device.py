"""Chooses the device and the dtype of a part of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from prometheus_client import Gauge

from services.errors import ConfigError, OutOfMemory, UnfitDevice
from services.model.spec import ModelSpec

MIN_CAPABILITY, BFLOAT16_CAPABILITY = (7, 0), (8, 0)
"""Compute capability from which Triton makes code for a GPU, and from which that may multiply bfloat16."""

log = logging.getLogger(__name__)


def torch_device(name: str, *, rank: int | None = None) -> torch.device:
    """Return the device called ``name``. ``auto`` is a GPU if there is one, ``auto:2`` the GPU with that number; one
    past the last GPU is shared.

    Args:
        rank: number of this worker among ranks, on this and other hosts: with ``auto`` and ``cuda`` each takes a GPU.

    Raises:
        ConfigError: there is no such device.
    """
    # Work behind a kernel that waits for a peer is held up in its queue: each stream needs its own, 8 are too few.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    kind, _, number = name.partition(":")
    if name == "cuda" or (kind == "auto" and (not number or number.isdigit())):
        if torch.cuda.is_available():
            return torch.device("cuda", _shared(int(number)) if number else (rank or 0) % torch.cuda.device_count())
        if kind == "auto":
            return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}.", hint="Try --device cpu or auto.") from error
    return device


def _shared(number: int) -> int:
    count = torch.cuda.device_count()
    if number >= count:
        log.warning(
            "GPU %d does not exist (there are %d); GPU %d is shared by several workers", number, count, number % count
        )
    return number % count


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a GPU that cannot compute in ``dtype``, before any weights are read.

    Raises:
        UnfitDevice: it lacks a feature, or torch has no code for it.
    """
    if device.type != "cuda" or torch.version.hip:
        return
    missing = lacking(torch.cuda.get_device_capability(device), dtype)
    if missing:
        raise UnfitDevice(
            f"{device} ({torch.cuda.get_device_name(device)}) cannot be used: {missing[0]}", hint=missing[1]
        )
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnfitDevice(
            f"{device} ({torch.cuda.get_device_name(device)}) cannot be used: {reason}.",
            hint="Install a build of torch for this GPU and its driver, or choose --device cpu.",
        ) from error


def lacking(capability: tuple[int, int], dtype: torch.dtype) -> tuple[str, str] | None:
    """Return what a GPU of ``capability`` lacks, and what to do; None if it lacks nothing.

    >>> lacking((9, 0), torch.bfloat16)
    >>> lacking((7, 5), torch.bfloat16)[1]
    'Give --dtype float16 or float32.'
    """
    has = "compute capability {}.{}".format(*capability)
    if capability < MIN_CAPABILITY:
        least = "{}.{}".format(*MIN_CAPABILITY)
        return f"it has {has}, and the kernels need {least}.", "Choose another GPU, or --device cpu."
    if dtype == torch.bfloat16 and capability < BFLOAT16_CAPABILITY:
        least = "{}.{}".format(*BFLOAT16_CAPABILITY)
        return f"it has {has}, and bfloat16 needs {least}.", "Give --dtype float16 or float32."
    return None


@contextmanager
def into_memory(device: torch.device) -> Iterator[None]:
    """Say what to do where the weights that are loaded inside do not fit. Raises OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where, spread = "GPUs", "--layout colocated --workers N"
        if device.type == "cpu":
            where, spread = "machines", "--layout disaggregated"
        raise OutOfMemory(
            f"The memory of {device} ran out while weights were loaded.",
            hint=f"End other processes that use it, or spread the experts over several {where}: {spread} "
            "(docs/layouts.md).",
        ) from error


def show_memory(gauge: Gauge, device: torch.device) -> None:
    """Bring ``gauge``, which has the label ``state``, up to what is used and free of ``device``, if it is a GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gauge.labels("used").set(total - free)
        gauge.labels("free").set(free)


def serving_dtype(name: str, spec: ModelSpec) -> torch.dtype:
    """Return the dtype called ``name``; ``auto`` is that of the checkpoint."""
    dtype: torch.dtype = getattr(torch, spec.dtype if name == "auto" else name)
    return dtype
