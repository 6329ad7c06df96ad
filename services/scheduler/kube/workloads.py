"""What the scheduler asks of a workload of this release: whose replicas it has, and how many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast, get_args

from services.kube import GROUP_OF, ROLE, SHARD
from services.scheduler.kube.api import Json
from services.scheduler.scaling.targets import Replicas, ScaledRole, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A set of replicas. ``first`` is the ordinal of its first pod (StatefulSets)."""

    name: str
    target: Target
    replicas: Replicas
    first: int = 0

    def holds(self, ordinal: int) -> bool:
        """Say whether the pod with ``ordinal`` is among those that are wanted."""
        return ordinal < self.first + self.replicas.wanted


def workload(found: Json) -> Workload | None:
    """Read ``found``, an object of the API. None: it is not scaled, like Redis, or was made from a LeaderWorkerSet."""
    labels = found["metadata"].get("labels") or {}
    role, shard = labels.get(ROLE), labels.get(SHARD)
    if role not in get_args(ScaledRole) or GROUP_OF in labels or (shard is not None and not shard.isdecimal()):
        return None
    spec, status = found.get("spec") or {}, found.get("status") or {}
    wanted = spec.get("replicas")
    return Workload(
        name=str(found["metadata"]["name"]),
        target=Target(cast("ScaledRole", role), None if shard is None else int(shard)),
        replicas=Replicas(wanted=1 if wanted is None else int(wanted), ready=int(status.get("readyReplicas") or 0)),
        first=int((spec.get("ordinals") or {}).get("start") or 0),
    )


def ordinal_of(pod: str) -> tuple[str, int] | None:
    """Return the StatefulSet and the number in the name of one of its pods. None: ``pod`` is no such name."""
    parts = re.fullmatch(r"(.+)-(0|[1-9][0-9]*)", pod)
    return (parts[1], int(parts[2])) if parts else None
