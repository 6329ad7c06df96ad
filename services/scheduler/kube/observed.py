"""Whether what the leader wants comes to pass, said in its log: no Prometheus is needed, which may be what is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from services.scheduler.scaling.targets import Replicas, Target

PATIENCE_S = 90.0
"""KEDA and the HorizontalPodAutoscaler look every few seconds, and a step of theirs may take two looks."""
TOLERANCE = 0.1
"""Share of the replicas by which a HorizontalPodAutoscaler may be off without acting."""

log = logging.getLogger(__name__)


class Observed:
    """Says once of each target that Kubernetes was told another number for too long, and once that it is told again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Target, float] = {}
        self._said: set[Target] = set()

    def note(self, wanted: Mapping[Target, int], told: Mapping[Target, Replicas]) -> None:
        for target, replicas in wanted.items():
            if target in told:
                self._compare(target, replicas, told[target].wanted)

    def _compare(self, target: Target, wanted: int, told: int) -> None:
        if abs(wanted - told) <= TOLERANCE * told:
            self._since.pop(target, None)
            if target in self._said:
                self._said.remove(target)
                log.info("%s: Kubernetes is told what is wanted again (%d)", target.name, told)
            return
        since = self._since.setdefault(target, self._clock())
        if target not in self._said and self._clock() - since >= PATIENCE_S:
            self._said.add(target)
            log.warning(
                "%s: %d replicas are wanted, and Kubernetes has been told %d for %.0f s: does KEDA run, does it reach "
                "Prometheus, are its bounds others? See `kubectl describe scaledobjects`",
                *(target.name, wanted, told, PATIENCE_S),
            )
