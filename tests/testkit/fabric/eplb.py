"""The greedy that DeepSeek's EPLB publishes, the baseline of placement: replicate, then pack, without a memory."""

from __future__ import annotations

from collections.abc import Sequence

from services.placement.load import Load
from services.placement.single_experts import Placement


def eplb(load: Load, devices: int, slots_per_device: int) -> Placement:
    """All slots are used. A device may get two copies of an expert: it then has a slot less for others."""
    return {layer: _pack(_replicas(loads_E, devices * slots_per_device), devices, slots_per_device)
            for layer, loads_E in load.items()}  # fmt: skip


def _replicas(loads_E: Sequence[float], slots: int) -> list[tuple[float, int]]:
    """``(load, expert)`` of every replica: each spare slot goes to the expert with the highest load per replica."""
    copies = [1] * len(loads_E)
    for _ in range(slots - len(loads_E)):
        copies[max(range(len(loads_E)), key=lambda expert: (loads_E[expert] / copies[expert], -expert))] += 1
    return [(load / count, expert) for expert, (load, count) in enumerate(zip(loads_E, copies, strict=True))
            for _ in range(count)]  # fmt: skip


def _pack(replicas: list[tuple[float, int]], devices: int, slots: int) -> tuple[tuple[int, ...], ...]:
    """Heaviest first, each to the least loaded device with a free slot."""
    held: list[list[int]] = [[] for _ in range(devices)]
    loads = [0.0] * devices
    for load, expert in sorted(replicas, key=lambda replica: (-replica[0], replica[1])):
        number = min((n for n in range(devices) if len(held[n]) < slots), key=lambda n: (loads[n], n))
        held[number].append(expert)
        loads[number] += load
    return tuple(tuple(sorted(experts)) for experts in held)
