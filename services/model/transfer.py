"""Copies between host and device in the order of the current stream. Neither direction waits for the device, which
works on what was launched before; a :class:`Mark` says when it is done with it.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """``values`` on ``device``. For a GPU they are copied before this returns; on a CPU the tensor shares their memory.

    By way of pinned memory: a copy from any other waits until the GPU has done all that it was given.
    """
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def download(values: Tensor) -> Tensor:
    """``values`` on the host, to be read when a later :class:`Mark` is reached; on a CPU ``values`` itself."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Mark:
    """A place in the device's queue: behind all that the current stream was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has come here. Other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
