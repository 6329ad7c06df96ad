"""Where a part of a model is computed, and in which type."""

from __future__ import annotations

import logging
import os

import torch

from services.errors import ConfigError
from services.model.spec import ModelSpec

log = logging.getLogger(__name__)


def torch_device(name: str, *, rank: int = 0, of_host: bool = True) -> torch.device:
    """The device called ``name``; ``cuda`` is the GPU with number ``rank``, and ``auto`` likewise if there is one.

    ``of_host``: ranks count the workers of this host alone, so that one past its GPUs shares one with another.

    Raises:
        ConfigError: there is no such device.
    """
    # Each queue holds up what comes behind a kernel that waits for a peer: one for each stream, not 8 for all of them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name in ("auto", "cuda") and torch.cuda.is_available():
        if rank >= (count := torch.cuda.device_count()) and of_host:
            log.warning("GPU %d is asked for, of %d: GPU %d has more than one worker", rank, count, rank % count)
        return torch.device("cuda", rank % count)
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}.", hint="Try --device cpu or auto.") from error
    return device


def serving_dtype(name: str, spec: ModelSpec) -> torch.dtype:
    """The type called ``name``; ``auto`` is the checkpoint's own."""
    dtype: torch.dtype = getattr(torch, spec.dtype if name == "auto" else name)
    return dtype
