"""A device's name in, the device out."""

from __future__ import annotations

import torch

from pocket_moe.errors import PocketError


def open_device(name: str, *, hint: str = "Pass --device cpu.") -> torch.device:
    """ "auto" is CUDA where there is one.

    Raises:
        PocketError: CUDA is asked for and not there; ``hint`` says what to do then.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PocketError("This machine has no CUDA device.", hint=hint)
    return device
