"""Chooses the device and the dtype of a part of a model."""

from __future__ import annotations

import logging
import os

import torch
from prometheus_client import Gauge

from services.errors import ConfigError
from services.model.spec import ModelSpec

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
