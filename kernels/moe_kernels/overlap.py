"""Whether a kernel may be launched before its predecessor ends (programmatic dependent launch).

Such a kernel calls ``gdc_wait`` before it touches memory at all: what it writes may be memory that the predecessor's
predecessors still read. Then only its launch overlaps, which is what small kernels in a chain wait for.
"""

from __future__ import annotations

import functools

import torch

HOPPER = (9, 0)


@functools.cache
def overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
