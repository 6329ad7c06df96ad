"""Pods of several attention workers with seats: KEDA scales them by load as whole pods, they sleep and wake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testkit.kube.cluster import Cluster
from testkit.kube.scaled import Scaled

WORKERS = 2
SETTINGS = ("layout=colocated", f"attention.workers={WORKERS}", "attention.colocated.shared=host")


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Iterator[Scaled]:
    with cluster.namespace("t-seats-scaling") as namespace:
        found = Scaled(
            cluster=cluster, namespace=namespace, kind="deployment", workers=WORKERS, pods=1, settings=SETTINGS
        )
        found.install()
        yield found


async def test_pods_come_and_go_by_load(pods: Scaled) -> None:
    await pods.grows_and_shrinks()


def test_pods_sleep_and_wake(pods: Scaled) -> None:
    pods.sleeps_and_wakes()
