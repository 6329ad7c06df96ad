"""Places single experts on devices that have slots for some: lock-step expert parallelism. Torch-free.

Legend: W windows of time, E experts, B bins of the search (here the devices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.errors import ConfigError
from services.placement.load import Load, checked_load
from services.placement.local_search import Arrangement, Bins

Placement = Mapping[int, tuple[tuple[int, ...], ...]]
"""Layer -> the experts of each device, ascending. The load of an expert is split evenly over its devices."""


def place_experts(
    load: Load,
    devices: int,
    slots_per_device: int,
    current: Placement | None = None,
    *,
    earlier: Sequence[Load] = (),
    price: float = 0.005,
) -> Placement:
    """Places experts so that each layer's most loaded device has least to do, and devices load few experts.

    Changes to ``current`` (an expert or a device may be missing in it) follow while they lower the sum over the windows
    of max / mean by more than ``price`` for each expert that a device has to load. A new placement, where each free
    slot replicates the expert with the highest load per replica, takes over if it is worth all its loads. Placing again
    what was placed, for the same load, changes nothing.

    Args:
        load: load of the latest window.
        slots_per_device: experts of a layer that fit on a device; all slots may be used.
        current: devices in the same order; an empty tuple for a new one.
        earlier: loads of earlier windows. The placement suits them and ``load`` equally, so that it holds when an
            earlier load comes back.
        price: price of loading one expert, in units of max / mean of one layer.

    Raises:
        ConfigError: there are fewer slots than experts, or a load is none.
    """
    windows = [checked_load(window) for window in (*earlier, load)]
    experts = len(windows[-1][min(windows[-1])])
    if devices < 1 or devices * slots_per_device < experts:
        raise ConfigError(
            f"{devices} devices with {slots_per_device} slots a layer cannot hold {experts} experts.",
            hint="Use more devices, or more slots on each.",
        )
    return {
        layer: _place_layer(
            [_even(window[layer]) for window in windows], devices, slots_per_device, (current or {}).get(layer), price
        )
        for layer in windows[-1]
    }


def _place_layer(
    loads_WE: list[list[float]],
    devices: int,
    slots: int,
    current: Sequence[Sequence[int]] | None,
    price: float,
) -> tuple[tuple[int, ...], ...]:
    free = [set[int]() for _ in range(devices)]
    fresh = _climbed(loads_WE, slots, _fresh(loads_WE, devices, slots), free, 0.0)
    if current is None:
        return _rows(fresh)
    home = [set(held) for held in current[:devices]] + free[len(current) :]
    kept = _climbed(loads_WE, slots, home, home, price)
    # Fresh in both orders: so what is chosen here is chosen again when it is ``current``.
    found = [kept, *(_arranged(loads_WE, slots, _matched(fresh.held, old), home, price) for old in (home, kept.held))]
    return _rows(min(found, key=Arrangement.value))


def _climbed(
    loads_WE: Sequence[Sequence[float]], slots: int, start: Sequence[set[int]], home: Sequence[set[int]], price: float
) -> Arrangement:
    arrangement = _arranged(loads_WE, slots, start, home, price)
    arrangement.climb()
    return arrangement


def _arranged(
    loads_WE: Sequence[Sequence[float]], slots: int, start: Sequence[set[int]], home: Sequence[set[int]], price: float
) -> Arrangement:
    bins = Bins(capacity_B=[1.0] * len(home), room_B=[slots] * len(home), price_B=[price] * len(home), replicate=True)
    return Arrangement(loads_WE, bins, start, home)


def _rows(arrangement: Arrangement) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(held)) for held in arrangement.held)


def _fresh(loads_WE: Sequence[Sequence[float]], devices: int, slots: int) -> list[set[int]]:
    """Return a new placement: copies where the load per copy is highest, packed onto the devices."""
    load_E = [sum(loads_W) for loads_W in zip(*loads_WE, strict=True)]
    copies_E = [1] * len(load_E)
    for _ in range(devices * slots - len(load_E)):
        open_experts = [expert for expert, copies in enumerate(copies_E) if copies < devices]
        if open_experts:
            copies_E[max(open_experts, key=lambda expert: (load_E[expert] / copies_E[expert], -expert))] += 1
    return _packed([load / copies for load, copies in zip(load_E, copies_E, strict=True)], copies_E, devices, slots)


def _packed(each_E: Sequence[float], copies_E: Sequence[int], devices: int, slots: int) -> list[set[int]]:
    """Packs copies, the heaviest first, each onto the least loaded device. A copy for which only devices with the same
    expert have room is left out; an expert's last copy never is."""
    held: list[set[int]] = [set() for _ in range(devices)]
    loads = [0.0] * devices
    copies = [expert for expert, number in enumerate(copies_E) for _ in range(number)]
    for expert in sorted(copies, key=lambda expert: (-each_E[expert], expert)):
        room = [number for number in range(devices) if len(held[number]) < slots and expert not in held[number]]
        if room:
            number = min(room, key=lambda number: (loads[number], len(held[number]), number))
            held[number].add(expert)
            loads[number] += each_E[expert]
    return held


def _matched(held: Sequence[set[int]], home: Sequence[set[int]]) -> list[set[int]]:
    """Return ``held`` in another order: each set to the device that has most of it already, the best matches first."""
    pairs = sorted(
        (-len(new & old), first, second) for first, new in enumerate(held) for second, old in enumerate(home)
    )
    by_device: dict[int, set[int]] = {}
    taken: set[int] = set()
    for _, first, second in pairs:
        if first not in taken and second not in by_device:
            by_device[second] = held[first]
            taken.add(first)
    return [by_device[second] for second in range(len(home))]


def _even(loads_E: Sequence[float]) -> list[float]:
    """Return the shares of the load, so that every window counts the same, however many rows it had."""
    total = sum(loads_E)
    return [load / total for load in loads_E]
