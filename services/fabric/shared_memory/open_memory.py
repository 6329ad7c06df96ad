"""Chooses the kind of shared memory that a process uses, by ``--fabric-shared`` and its device."""

from __future__ import annotations

import logging

import torch

from services.errors import ConfigError, FabricError
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.memory import PeerMemory

log = logging.getLogger(__name__)


def memory_for(choice: str, device: torch.device, *, colocated: bool = False) -> PeerMemory | None:
    """Return the memory that ``--fabric-shared`` asks for.

    The result is None for ``off``, and for ``auto`` where there is no peer on another GPU or the driver cannot share.

    Args:
        colocated: this process has attention and a seat on ``device``, whose kernels wait for each other.

    Raises:
        ConfigError: ``host`` was chosen with a GPU.
    """
    if choice == "off":
        return None
    if choice == "host":
        if device.type != "cpu":
            raise ConfigError("--fabric-shared host needs --device cpu.", hint="Choose auto or off.")
        return HostMemory()
    # Processes that share one GPU run on it alternately: a wait for each other inside a step would last a time slice in
    # every layer. A colocated worker is one process, so that its kernels run side by side.
    if device.type != "cuda" or (torch.cuda.device_count() < 2 and not colocated):
        return None
    from services.fabric.shared_memory.cuda_memory import CudaMemory  # looks for the driver

    try:
        return CudaMemory(device, on_side_stream=colocated)
    except FabricError as error:
        log.warning("not using shared memory between workers: %s", error)
        return None
