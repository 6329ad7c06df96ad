"""Copies between host and device in the order of the current stream. They do not wait for it; a :class:`Mark` does."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy ``values`` to ``device``. A GPU gets a copy of what they are now; on a CPU the tensor shares their memory.

    The copy goes through pinned memory: any other copy would wait until the GPU has done all earlier work.
    """
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def download(values: Tensor) -> Tensor:
    """Copy ``values`` to the host, to be read once a later :class:`Mark` is reached; on a CPU return ``values``."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Awaited(Protocol):
    """A point in the device's work, such as a :class:`Mark`."""

    def wait(self) -> None: ...


class Mark:
    """A point in the current stream of the device, behind all work launched so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has come here. Other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
