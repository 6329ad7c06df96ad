"""Where the processes of an application are to run, and for which of them there is no room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.config import Settings
from services.ray.arguments import Arguments
from services.ray.fleet import Fleet, Place, nodes, resources
from services.ray.units import Unit, bundle_digest


class Placement:
    """Places units by what ``arguments`` reserve for them. ``failed_on`` has the nodes on which a unit failed."""

    def __init__(self, fleet: Fleet, arguments: Arguments) -> None:
        self._fleet, self._arguments = fleet, arguments
        self.failed_on: dict[str, set[str]] = {}

    def pack_of(self, unit: Unit) -> str | None:
        """Return the name of the unit's placement group: another one where other resources are reserved."""
        return f"{unit.pack}@{bundle_digest(self.reserved(unit))}" if unit.pack else None

    def reserved(self, unit: Unit) -> list[object]:
        """Return what a process is started with beside its settings."""
        return [self._arguments.resources_of(unit.role).model_dump(mode="json"), self._arguments.runtime_env]

    def gpus(self, unit: Unit) -> float:
        asked = self._arguments.resources_of(unit.role).gpus
        if asked is not None:
            return asked
        on_gpu = self._arguments.settings.get("device") != "cpu" and resources().get("GPU", 0) > 0
        return 1.0 if on_gpu else 0.0

    def place(self, unit: Unit, settings: Settings, others: Iterable[tuple[Unit | None, str]]) -> Place:
        """Return where ``unit`` is to run: packed with its like, or on the node with least of its kind.

        Args:
            others: the units that are there, None for those that nobody wants, and the node of each.
        """
        needs = self._arguments.resources_of(unit.role)
        if unit.pack is not None:
            bundle = {"CPU": needs.cpus, "GPU": self.gpus(unit)} | needs.resources
            bundle = {name: amount for name, amount in bundle.items() if amount}
            group = self._fleet.pack(str(self.pack_of(unit)), bundle, settings.workers, needs.labels)
            return Place(pack=group, bundle=int(unit.name.rpartition("-")[2]))
        return Place(node=self._emptiest(unit, others))

    def _emptiest(self, unit: Unit, others: Iterable[tuple[Unit | None, str]]) -> str | None:
        """Return the node that has least units of the same kind, and among these least of all."""
        alike: Counter[str] = Counter()
        every: Counter[str] = Counter()
        for other, node in others:
            every[node] += 1
            alike[node] += other is not None and other.kind == unit.kind
        labels = self._arguments.resources_of(unit.role).labels
        fit = [node["NodeID"] for node in nodes() if _has_labels(node, labels)]
        failed = self.failed_on.get(unit.name, set())
        fit = [node for node in fit if node not in failed] or fit
        return min(fit, key=lambda node: (alike[node], every[node], node), default=None)

    def lacking(self, waiting: Sequence[Unit]) -> str:
        """Return for which of the units that wait Ray has no room, and what they need; empty: for all."""
        unplaced = {name for name, there in self._fleet.packs().items() if not there}
        if packed := [unit for unit in waiting if self.pack_of(unit) in unplaced]:
            needs = self._arguments.resources_of(packed[0].role)
            each = f"{needs.cpus:g} CPU and {self.gpus(packed[0]):g} GPU"
            groups = Counter(str(unit.pack) for unit in packed)
            said = [f"{pack} waits for one node with room for {count} x ({each})" for pack, count in groups.items()]
            return f"{'; '.join(said)}; the largest has {_largest()}"
        free = resources(free=True) if waiting else {}
        wanted: Counter[str] = Counter()
        for unit in waiting:
            needs = self._arguments.resources_of(unit.role)
            reserved = {"CPU": needs.cpus, "GPU": self.gpus(unit)} | needs.resources
            if not any(_holds(node, reserved, needs.labels) for node in nodes()):
                amounts = " and ".join(f"{amount:g} {name}" for name, amount in reserved.items() if amount)
                labels = "".join(f", {name}={value}" for name, value in needs.labels.items())
                return f"{unit.name} waits for a node with {amounts}{labels}, which no node has"
            wanted.update(reserved)
        lacks = {name: need for name, need in wanted.items() if need > free.get(name, 0)}
        short = [f"{free.get(name, 0):g} of {need:g} {name}" for name, need in lacks.items()]
        if not short:
            return ""
        return f"{', '.join(unit.name for unit in waiting)} wait for room: there are {' and '.join(short)} free"


def _largest() -> str:
    """Return what the node with most GPUs, and most cores of these, has in all."""
    found = [each["Resources"] for each in nodes()]
    largest: Mapping[str, float] = max(found, key=lambda each: (each.get("GPU", 0), each.get("CPU", 0)), default={})
    return f"{largest.get('CPU', 0):g} CPU and {largest.get('GPU', 0):g} GPU"


def _holds(node: Mapping[str, Any], reserved: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    total = node["Resources"]
    return _has_labels(node, labels) and all(total.get(name, 0) >= amount for name, amount in reserved.items())


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    known = node.get("Labels") or {}
    return all(known.get(name) == value for name, value in labels.items())
