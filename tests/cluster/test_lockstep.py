"""Attention workers that share the experts, in groups of pods: they answer as recorded, are scaled as groups by KEDA,
sleep and wake, and lose a rank. Where the cluster has no controller of LeaderWorkerSets something stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from testkit.kube.cluster import Cluster, until
from testkit.kube.leader_worker_sets import controlled, defined
from testkit.kube.release import COMES_BACK
from testkit.kube.scaled import Scaled

RANKS = 2
SETTINGS = ("layout=lockstep", f"attention.workers={RANKS}")


@pytest.fixture(scope="module")
def lockstep(cluster: Cluster) -> Iterator[Scaled]:
    with ExitStack() as stack:
        has_controller = stack.enter_context(defined(cluster))
        namespace = stack.enter_context(cluster.namespace("t-lockstep"))
        if not has_controller:
            stack.enter_context(controlled(cluster, namespace))
        found = Scaled(
            cluster=cluster, namespace=namespace, kind="leaderworkerset", workers=RANKS, pods=RANKS, settings=SETTINGS
        )
        found.install()
        yield found


async def test_groups_come_and_go_by_load(lockstep: Scaled) -> None:
    """The ranks of a group that goes drain together."""
    await lockstep.grows_and_shrinks()


async def test_a_rank_whose_pod_is_deleted_with_force_loses_no_request(lockstep: Scaled) -> None:
    """There is one group: what its ranks do not answer in a second goes on when they are connected again."""
    before = lockstep.release.pods("attention")[0]

    def kill() -> None:
        lockstep.release.kubectl("delete", "pod", before["metadata"]["name"], "--force", "--grace-period=0")
        until(lambda: lockstep.replicas() == (1, 0), 60, "it is missed")
        until(lambda: lockstep.replicas() == (1, 1), 120, "the ranks have met again")

    outcome = await lockstep.release.under_load(kill, clients=2, manner=COMES_BACK, lead_s=1.0)
    print(f"\n{outcome}")


def test_groups_sleep_and_wake(lockstep: Scaled) -> None:
    lockstep.sleeps_and_wakes()
