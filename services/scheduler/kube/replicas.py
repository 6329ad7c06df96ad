"""Replica counts of this release as Kubernetes has them, and the seats that leave by these counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.queue.seats import SeatState
from services.scheduler.kube.api import Api
from services.scheduler.kube.follower import Follower
from services.scheduler.kube.workloads import Workload, ordinal_of
from services.scheduler.scaling.targets import Replicas, Target


class KubeReplicas:
    """Follows StatefulSets, Deployments and, where attention workers come in ``groups``, LeaderWorkerSets from
    :meth:`start` to :meth:`close`."""

    def __init__(self, connect: Callable[[], Api], *, groups: bool = False) -> None:
        self._sets = Follower("statefulsets", connect)
        self._all = [self._sets, Follower("deployments", connect)]
        self._all += [Follower("leaderworkersets", connect)] if groups else []

    def start(self) -> None:
        for each in self._all:
            each.start()

    def close(self) -> None:
        for each in self._all:
            each.close()

    def counts(self) -> Mapping[Target, Replicas] | None:
        """Return the replicas that are set and that are ready, by target. None: they are not known."""
        found: list[Workload] = []
        for each in self._all:
            if (workloads := each.workloads) is None:
                return None
            found += workloads.values()
        return summed(found)

    def staying(self, seats: Sequence[SeatState]) -> list[SeatState]:
        """Return ``seats``, with those that leave marked as dismissed; see :func:`without_leaving`."""
        sets = self._sets.workloads
        return list(seats) if sets is None else without_leaving(seats, sets)


def summed(workloads: Sequence[Workload]) -> dict[Target, Replicas]:
    """Sum replicas by target, of which there may be several sets."""
    found: dict[Target, Replicas] = {}
    for each in workloads:
        before = found.get(each.target, Replicas(wanted=0, ready=0))
        found[each.target] = Replicas(
            wanted=before.wanted + each.replicas.wanted, ready=before.ready + each.replicas.ready
        )
    return found


def without_leaving(seats: Sequence[SeatState], sets: Mapping[str, Workload]) -> list[SeatState]:
    """Return ``seats``, with those in pods beyond their set's replicas marked as dismissed: the next table does without
    them, before SIGTERM reaches them. Seats of unknown sets stay.

    Nothing of this is stored: once the count is higher again, the seat counts again. No group loses its last ready seat
    by it: that one leaves when its worker asks to.
    """
    leaving = {seat.number for seat in seats if _beyond(seat, sets)}
    served = {
        seat.report.digest for seat in seats if seat.status == "ready" and seat.stays and seat.number not in leaving
    }
    return [
        replace(seat, dismissed=True)
        if seat.number in leaving and (seat.status != "ready" or seat.report.digest in served)
        else seat
        for seat in seats
    ]


def _beyond(seat: SeatState, sets: Mapping[str, Workload]) -> bool:
    parts = ordinal_of(seat.info.pod or "")
    if parts is None or (found := sets.get(parts[0])) is None:
        return False
    return not found.holds(parts[1])
