"""Which processes an application on Ray consists of. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.config import ATTENTION, COLOCATED, EXPERTS, SCHEDULER, Role, Settings, roles_of
from services.scheduler.scaling.targets import Target

HASH_LENGTH = 6
_COUNTS = frozenset({"workers", "expert_workers"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One process that an actor keeps alive.

    ``changes`` are its settings beside those of all. Units of one ``kind`` are replicas of one another, which are
    spread over nodes; units of one ``pack`` are workers that belong on one node, behind its NVLink.
    """

    name: str
    role: Role
    kind: str
    changes: Mapping[str, object] = field(default_factory=dict)
    pack: str | None = None


def units(settings: Settings, *, schedulers: int, targets: Mapping[Target, int] | None = None) -> list[Unit]:
    """Return all processes but the gateways, in the order in which they are started.

    Args:
        targets: numbers of replicas that the leading scheduler wants; for those that it does not name, and None, the
            settings count.
    """
    wanted = targets or {}
    found = [Unit(name=f"{SCHEDULER}-{number}", role=SCHEDULER, kind=SCHEDULER) for number in range(schedulers)]
    found += _experts(settings, wanted)
    replicas = wanted.get(Target("attention"))
    if settings.layout == "colocated":
        return found + _colocated(settings, 1 if replicas is None else replicas)
    count = settings.workers if replicas is None else replicas
    return found + [Unit(name=f"{ATTENTION}-{number}", role=ATTENTION, kind=ATTENTION) for number in range(count)]


def digest(settings: Settings, unit: Unit, reserved: object = None) -> str:
    """Return a short name of what the unit's process is started with: with other settings of its role, or with other
    resources in ``reserved``, it is another process. It begins with :func:`model_digest`.

    How many processes there are is not in it: more or less of them replace nobody.
    """
    roles = (ATTENTION, EXPERTS) if unit.role == COLOCATED else (unit.role,)
    values = settings.model_dump(mode="json") | dict(unit.changes)
    own = {name: value for name, value in values.items() if name not in _COUNTS and {*roles_of(name)} & {*roles}}
    return f"{model_digest(settings)}{_hash([own, reserved])}"


def model_digest(settings: Settings) -> str:
    """Return a short name of the model and how its weights are held: processes of different ones refuse each other."""
    return _hash([str(settings.model), settings.revision, settings.expert_format, settings.dense_format])


def bundle_digest(reserved: object) -> str:
    """Return a short name of what is reserved for each process of a node."""
    return _hash(reserved)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LENGTH]


def _experts(settings: Settings, wanted: Mapping[Target, int]) -> Iterator[Unit]:
    groups = settings.expert_groups or settings.disaggregated_experts
    for group in range(groups if settings.layout == "disaggregated" else 0):
        # As many seats as the settings say, dealt out to the groups in turn.
        usual = (settings.disaggregated_experts - group + groups - 1) // groups
        for number in range(wanted.get(Target("experts", group), max(1, usual))):
            yield Unit(
                name=f"{EXPERTS}-{group}-{number}",
                role=EXPERTS,
                kind=f"{EXPERTS}-{group}",
                changes={"expert_groups": groups, "expert_group": group, "fabric_port": 0},
            )


def _colocated(settings: Settings, replicas: int) -> list[Unit]:
    changes = {"expert_groups": settings.expert_groups or settings.seats, "fabric_port": 0}
    return [
        Unit(
            name=f"{COLOCATED}-{replica}-{number}",
            role=COLOCATED,
            kind=COLOCATED,
            changes=changes,
            pack=f"{COLOCATED}-{replica}" if settings.workers > 1 else None,
        )
        for replica in range(replicas)
        for number in range(settings.workers)
    ]
