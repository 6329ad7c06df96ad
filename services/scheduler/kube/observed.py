"""Compares the replicas that the leader wants with those that Kubernetes has, and logs where they stay different.

The log needs no Prometheus, which may be what is away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from services.scheduler.scaling.targets import Replicas, Target

GRACE_S = 90.0
"""KEDA and the HorizontalPodAutoscaler look every few seconds, and a step of theirs may take two looks."""
TOLERANCE = 0.1
"""Share of the replicas by which a HorizontalPodAutoscaler may be off without acting."""

log = logging.getLogger(__name__)


class Observed:
    """Warns once of each target whose workload has had another number of replicas for too long, and notes its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Target, float] = {}
        self._said: set[Target] = set()

    def note(self, wanted: Mapping[Target, int], counts: Mapping[Target, Replicas]) -> None:
        for target, replicas in wanted.items():
            if target in counts:
                self._compare(target, replicas, counts[target].wanted)

    def _compare(self, target: Target, wanted: int, found: int) -> None:
        if abs(wanted - found) <= TOLERANCE * found:
            self._since.pop(target, None)
            if target in self._said:
                self._said.remove(target)
                log.info("%s: the replicas set in Kubernetes (%d) match the desired number again", target.name, found)
            return
        since = self._since.setdefault(target, self._clock())
        if target not in self._said and self._clock() - since >= GRACE_S:
            self._said.add(target)
            log.warning(
                "%s: %d replicas are desired, but Kubernetes has been set to %d for %.0f s: check that KEDA runs, "
                "reaches Prometheus and has the same bounds (`kubectl describe scaledobjects`)",
                *(target.name, wanted, found, GRACE_S),
            )
