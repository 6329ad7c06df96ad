"""Which kind of shared memory a process uses, by ``--fabric-shared`` and its device."""

from __future__ import annotations

import logging

import torch

from services.errors import ConfigError, FabricError
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.memory import PeerMemory

log = logging.getLogger(__name__)


def memory_for(choice: str, device: torch.device, *, aside: bool = False) -> PeerMemory | None:
    """What ``--fabric-shared`` asks for; None where there is nothing to share, or (``auto``) it cannot be.

    ``aside``: while kernels of this process wait for one another, see
    :class:`services.fabric.shared_memory.cuda_memory.CudaMemory`.

    Raises:
        ConfigError: ``host`` beside a GPU.
    """
    if choice == "off":
        return None
    if choice == "host":
        if device.type != "cpu":
            raise ConfigError("--fabric-shared host needs --device cpu.", hint="Choose auto or off.")
        return HostMemory()
    # Workers that share one GPU take turns on it: waiting for each other inside a step would last a turn each time.
    # One that has attention and a seat in one process does not.
    if device.type != "cuda" or (torch.cuda.device_count() < 2 and not aside):
        return None
    from services.fabric.shared_memory.cuda_memory import CudaMemory  # looks for the driver

    try:
        return CudaMemory(device, aside=aside)
    except FabricError as error:
        log.warning("Rows do not go through shared memory: %s", error)
        return None
