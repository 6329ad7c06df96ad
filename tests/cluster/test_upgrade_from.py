"""An upgrade from another commit of this repository, its chart and its images, to what is here: under load, nothing
fails. KUBE_FROM names the commit; a clone without history has none to come from. Where the commit's chart has another
Redis, its only one is replaced, too: clients then do what a 503 asks of them (see docs/kubernetes-operations.md)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.kube.chart import chart_words
from testkit.kube.cluster import IMAGES, LOCAL, TAG, Cluster, until
from testkit.kube.release import COMES_BACK, NAME, WAIT, Release, is_leaving
from testkit.processes.earlier import unpack

FROM = os.environ.get("KUBE_FROM", "")
OLD = f"{TAG}-from"
OURS = ("expertmesh-control", "expertmesh-worker-cpu")
OLD_IMAGES = (f"images.control.tag={OLD}", f"images.worker.tag={OLD}")
pytestmark = pytest.mark.skipif(not FROM, reason="KUBE_FROM names no commit to upgrade from")


@pytest.fixture(scope="module")
def old_chart(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words after ``helm install NAME``: that commit's chart, with images built of that commit."""
    tree = unpack(tmp_path_factory.mktemp("from"), FROM)
    for name in OURS:
        _build(cluster, tree, name)
    return chart_words("dev", *LOCAL, *OLD_IMAGES, chart=tree / "helm/expertmesh")


def _build(cluster: Cluster, tree: Path, name: str) -> None:
    """Build in the tree of the commit, whose paths may differ."""
    words = [cluster.tool, "build", "-t", f"{name}:{OLD}", *IMAGES[name]]
    done = subprocess.run(words, cwd=tree, env=cluster.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def before(cluster: Cluster, old_chart: list[str]) -> Iterator[Release]:
    with cluster.namespace("t-upgrade-from") as namespace:
        release = Release(cluster=cluster, namespace=namespace)
        release.helm("install", NAME, *old_chart, *WAIT)
        yield release


async def test_an_upgrade_from_another_commit_under_load_fails_nothing(before: Release) -> None:
    key, old, began = before.key, before.uids() - before.uids("redis"), time.monotonic()
    outcome = await before.under_load(lambda: before.apply("upgrade"), manner=COMES_BACK, lead_s=5)
    print(f"\nupgrade from {FROM} in {time.monotonic() - began:.0f} s: {outcome}")
    assert outcome.finished > 10
    until(lambda: old.isdisjoint(before.uids()), 120, "the old pods are gone")
    assert before.key == key


async def test_a_rollback_to_it_under_load_fails_nothing(before: Release, old_chart: list[str]) -> None:
    def roll_back() -> None:
        if not (Path(old_chart[0]) / "files/redis-users.acl").exists():  # see docs/kubernetes-operations.md
            before.apply("upgrade", "redis.acl.login=default")
            until(lambda: not any(map(is_leaving, before.pods())), 120, "the pods of before have ended")
        before.helm("rollback", NAME, "1", *WAIT)

    outcome = await before.under_load(roll_back, manner=COMES_BACK, lead_s=5)
    print(f"\nback to {FROM}: {outcome}")
