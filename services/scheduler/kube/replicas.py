"""Replica counts of this release by what Kubernetes says, and which seats leave by them."""

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
        """What Kubernetes was told and what is ready; None while that is not known."""
        found: list[Workload] = []
        for each in self._all:
            if (workloads := each.workloads) is None:
                return None
            found += workloads.values()
        return summed(found)

    def staying(self, seats: Sequence[SeatState]) -> list[SeatState]:
        """``seats``, those that leave marked as if they had been asked to; see :func:`without_leaving`."""
        sets = self._sets.workloads
        return list(seats) if sets is None else without_leaving(seats, sets)


def summed(workloads: Sequence[Workload]) -> dict[Target, Replicas]:
    """By target: there may be several sets of one role."""
    found: dict[Target, Replicas] = {}
    for each in workloads:
        before = found.get(each.target, Replicas(wanted=0, ready=0))
        found[each.target] = Replicas(
            wanted=before.wanted + each.replicas.wanted, ready=before.ready + each.replicas.ready
        )
    return found


def without_leaving(seats: Sequence[SeatState], sets: Mapping[str, Workload]) -> list[SeatState]:
    """Marks seats in pods beyond their set's replicas as dismissed: the next table does without them, before SIGTERM
    reaches them. A set of which nothing is known says nothing.

    Nothing of this is written down: once the count is higher again, the seat counts again. And no group loses its last
    seat by it: that one leaves when its worker says so.
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
