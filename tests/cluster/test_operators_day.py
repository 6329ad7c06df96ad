"""An operator's day on a release under load: upgrades of one role, rollouts that cannot work, keys that come and go,
and a move to a second release. No request fails, no answer differs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from testkit.kube.cluster import IMAGES, TAG, Cluster, CommandFailed, until
from testkit.kube.release import COMES_BACK, NAME, PLAIN, PREFIX, WAIT, Manner, Release, is_leaving
from testkit.kube.tls_redis import tls_redis

from services.cli.main import main

KEYS = "tenants"
SETTINGS = ("experts.replicas=2", f"auth.existingSecret={KEYS}")
NEXT = f"{TAG}-next"
"""A tag of the same images."""
TIMEOUT_S = 25
"""How long a rollout that cannot work is waited for."""


def _command(*words: str) -> tuple[int, str]:
    """Exit code of `expertmesh` and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return main(words), said.getvalue()


class Tenants:
    """The file of API keys as an operator keeps it, and the Secret that is made of it."""

    def __init__(self, cluster: Cluster, namespace: str, file: Path) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._file = file

    def create(self, name: str) -> str:
        """The key of a new tenant."""
        code, said = _command("keys", "create", name, "--api-keys-file", str(self._file))
        assert code == 0
        return said.split()[0]

    def revoke(self, name: str) -> None:
        assert _command("keys", "revoke", name, "--api-keys-file", str(self._file))[0] == 0

    def publish(self, plain: str) -> None:
        """``plain``: the key that clients of the tests use."""
        words = (f"--from-file=keys.yaml={self._file}", f"--from-literal=api-key={plain}")
        made = self._cluster.kubectl(
            *("-n", self._namespace, "create", "secret", "generic", KEYS, *words, "--dry-run=client", "-o", "yaml")
        )
        self._cluster.kubectl("-n", self._namespace, "apply", "-f", "-", text=made)


class Day:
    """The release, and what was changed in it so far."""

    def __init__(self, release: Release, tenants: Tenants) -> None:
        self.release = release
        self.tenants = tenants
        self.settings = list(SETTINGS)

    def upgrade(self, *settings: str, words: tuple[str, ...] = WAIT) -> None:
        """Raises CommandFailed."""
        self.release.apply("upgrade", *self.settings, *settings, words=words)

    def pods(self) -> dict[str, set[str]]:
        """Uids of the pods by role, without pods that end."""
        found: dict[str, set[str]] = {}
        for pod in self.release.pods():
            if not is_leaving(pod):
                meta = pod["metadata"]
                found.setdefault(meta["labels"]["app.kubernetes.io/component"], set()).add(meta["uid"])
        return found

    async def unharmed(
        self, what: str, act: Callable[[], object], release: Release | None = None, manner: Manner = PLAIN
    ) -> None:
        """``act`` under load."""
        began = time.monotonic()
        outcome = await (release or self.release).under_load(act, manner=manner, lead_s=1.0)
        print(f"\n{what}: {time.monotonic() - began:.0f} s, {outcome}")
        assert outcome.finished > 5


@pytest.fixture(scope="module")
def day(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    for image in IMAGES:
        names = (f"docker.io/library/{image}:{tag}" for tag in (TAG, NEXT))
        cluster.run("ctr", "image", "tag", "--force", *names)
    with cluster.namespace("t-day") as namespace:
        tenants = Tenants(cluster, namespace, tmp_path_factory.mktemp("keys") / "keys.yaml")
        tenants.publish(tenants.create("tests"))
        release = Release(cluster=cluster, namespace=namespace, keys=KEYS)
        release.apply("install", *SETTINGS)
        yield Day(release, tenants)


@pytest.mark.parametrize(
    ("setting", "roles"),
    [
        ("scheduler.config.log_level=debug", {"scheduler"}),
        (f"images.control.tag={NEXT}", {"gateway", "scheduler"}),
        (f"images.worker.tag={NEXT}", {"attention", "experts"}),
    ],
)
async def test_an_upgrade_replaces_the_pods_of_its_roles_and_fails_nothing(
    day: Day, setting: str, roles: set[str]
) -> None:
    before = day.pods()
    day.settings.append(setting)
    await day.unharmed(setting, day.upgrade)
    after = day.pods()
    assert {role for role in before if before[role].isdisjoint(after[role])} == roles
    assert {role for role in before if before[role] == after[role]} == set(before) - roles


STUCK = (
    "images.control.tag=nowhere",
    *("attention.extraEnv[0].name=EXPERTMESH_NAMESPACE", "attention.extraEnv[0].value=elsewhere"),
    "experts.config.expert_capacity=1",
)
"""Gateways and schedulers have no image, attention workers wait for a table, expert workers for a group that fits."""
CRASHING = (
    "images.worker.tag=nowhere",
    *("gateway.extraEnv[0].name=EXPERTMESH_MODEL", "gateway.extraEnv[0].value=/model/none"),
    *("scheduler.extraEnv[0].name=EXPERTMESH_LEASE", "scheduler.extraEnv[0].value=never"),
)


async def test_a_rollout_that_cannot_work_takes_no_traffic_and_is_rolled_back(day: Day) -> None:
    cluster, namespace, before = day.release.cluster, day.release.namespace, day.pods()

    def troubles() -> str:
        code, said = _command("status", "--kube-namespace", namespace, "--json")
        found = json.loads(said)
        assert (code, found["missing"]) == (0, [])  # the old pods serve
        return "; ".join(found["troubles"])

    def try_it() -> None:
        with pytest.raises(CommandFailed, match=r"context deadline exceeded|timed out waiting"):
            day.upgrade(*STUCK, words=("--wait", "--timeout", f"{TIMEOUT_S}s"))
        said = troubles()
        for words in ("gateway: its rollout waits", "scheduler: its rollout waits", "ImagePull"):
            assert words in said
        assert "waiting for a routing table" in said
        assert "experts 1: 1 of 2 ready" in said
        day.release.helm("rollback", NAME, *WAIT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", cluster.environment["KUBECONFIG"])
        await day.unharmed("a rollout that cannot work, and its rollback", try_it)
        assert await asyncio.to_thread(troubles) == ""
    after = day.pods()
    assert {role for role in before if before[role] == after[role]} == set(before) - {"experts"}
    assert len(before["experts"] & after["experts"]) == 2  # one of each group was never touched


async def test_an_atomic_upgrade_that_crashes_leaves_everything_as_it_was(day: Day) -> None:
    before = day.pods()

    def try_it() -> None:
        with pytest.raises(CommandFailed, match="release mesh failed, and has been rolled back due to atomic"):
            day.upgrade(*CRASHING, words=("--atomic", "--timeout", f"{TIMEOUT_S}s"))

    await day.unharmed("an atomic upgrade that crashes", try_it)
    after = day.pods()
    assert {role for role in before if before[role] == after[role]} == set(before) - {"experts"}


async def test_a_redis_that_cannot_run_is_rolled_back_and_nothing_is_lost(day: Day) -> None:
    def try_it() -> None:
        with pytest.raises(CommandFailed, match=r"context deadline exceeded|timed out waiting"):
            day.upgrade("images.redis.tag=nowhere", words=("--wait", "--timeout", "10s"))
        day.release.helm("rollback", NAME, *WAIT)

    await day.unharmed("a Redis that cannot run, and its rollback", try_it, manner=COMES_BACK)


def test_keys_come_and_go_without_a_restart(day: Day) -> None:
    before = day.pods()["gateway"]

    def known(key: str) -> bool:
        client = day.release.client().with_options(api_key=key)
        try:
            return bool(client.models.list().data)
        except openai.AuthenticationError:
            return False

    plain = day.release.key
    alice, bob = (day.tenants.create(name) for name in ("alice", "bob"))
    assert not known(alice)
    day.tenants.publish(plain)
    print(f"\na new key works after {until(lambda: known(alice) and known(bob), 150, 'the new keys work'):.0f} s")
    day.tenants.revoke("alice")
    day.tenants.publish(plain)
    print(f"a revoked key is refused after {until(lambda: not known(alice), 150, 'the old key is refused'):.0f} s")
    assert known(bob)
    assert day.pods()["gateway"] == before
    restarts = [each["restartCount"] for pod in day.release.pods() for each in pod["status"]["containerStatuses"]]
    assert set(restarts) == {0}


def test_status_in_a_pod_needs_no_options(day: Day) -> None:
    said = day.release.kubectl("exec", f"deploy/{PREFIX}-scheduler", "--", "expertmesh", "status")
    assert "serves its model" in said
    assert "shard group 1      2 seats" in said
    assert "leading scheduler  mesh-expertmesh-scheduler-" in said


async def test_clients_move_to_a_second_release(day: Day, tmp_path: Path) -> None:
    """Through a Service of the operator's own, whose selector names the release. The second one has a Redis outside the
    chart, with TLS by a private authority."""
    external = tls_redis(day.release.cluster, day.release.namespace, tmp_path)
    component = {"app.kubernetes.io/component": "gateway"}

    def select(name: str) -> None:
        spec = {"selector": component | {"app.kubernetes.io/instance": name}, "ports": [{"port": 8000}]}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "llm"}, "spec": spec}
        day.release.kubectl("apply", "-f", "-", text=json.dumps(body))

    def move() -> None:
        replace(day.release, name="next").apply("install", f"auth.existingSecret={KEYS}", *external)
        select("next")
        day.release.kubectl("scale", f"deploy/{PREFIX}-gateway", "--replicas=0")
        until(lambda: not day.release.pods("gateway"), 120, "its gateways have ended what they had")
        day.release.helm("uninstall", NAME, *WAIT)

    select(NAME)
    await day.unharmed("a move to a second release", move, replace(day.release, service="llm"))
    until(lambda: not day.release.pods(), 120, "the first one is gone")
