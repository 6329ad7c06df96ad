"""Where a part of a model is computed, and in which type."""

from __future__ import annotations

import os

import torch

from services.errors import ConfigError
from services.model.spec import ModelSpec


def torch_device(name: str, *, rank: int = 0) -> torch.device:
    """The device called ``name``; ``auto`` is a GPU if there is one, the next one for each next ``rank`` of this host.

    Raises:
        ConfigError: there is no such device.
    """
    # Each queue holds up what comes behind a kernel that waits for a peer: one for each stream, not 8 for all of them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name == "auto":
        return (
            torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
        )
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
