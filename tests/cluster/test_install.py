"""Profile dev on a real cluster, from `helm install` to `helm uninstall`, in a namespace that enforces `restricted`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from testkit.kube.chart import PACKAGES
from testkit.kube.cluster import TAG, Cluster, table, until
from testkit.kube.release import NAME, PREFIX, PYTHON, WAIT, Release

KEPT = {"Secret/" + PREFIX + suffix for suffix in ("-redis", "-redis-users", "-fabric", "-api-keys")}
KINDS = (
    "deployments,statefulsets,pods,services,endpoints,configmaps,secrets,serviceaccounts,networkpolicies,pdb,jobs,pvc"
)
WATCHING = "import kubernetes.client.api_client; "
"""What a scheduler loads with autoscaling."""
OURS = f"app.kubernetes.io/instance={NAME}"


@dataclass
class Installed:
    """A release, and what came before its first token."""

    release: Release
    began: float
    phases: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Installed]:
    with cluster.namespace("t-install") as namespace:
        release, began, clock = Release(cluster=cluster, namespace=namespace), time.time(), time.monotonic()
        release.apply("install")
        found = Installed(release, began)
        found.phases |= {f"{pod} is ready": after for pod, after in sorted(release.ready_after(began).items())}
        found.phases["helm install --wait returns"] = time.monotonic() - clock
        stream = release.client().completions.create(model="pocket", prompt="define: moor\n", stream=True)
        next(iter(stream))
        found.phases["first token"] = time.monotonic() - clock
        yield found


def test_it_answers_through_the_service_as_recorded(installed: Installed) -> None:
    print("\nseconds after helm install began\n" + table(list(installed.phases.items())))
    installed.release.answers_as_recorded(5)
    assert installed.release.client().models.list().data[0].id == "pocket"


def test_helm_test_passes(installed: Installed) -> None:
    assert "Phase:          Succeeded" in installed.release.helm("test", NAME, "--timeout", "3m")


@pytest.mark.parametrize("role", ["gateway", "scheduler"])
def test_a_control_role_is_loaded_in_two_seconds(installed: Installed, role: str) -> None:
    """The time is processor time: what else runs on this machine must not count."""
    release = installed.release
    look = f"import services.{role}.role, time; {WATCHING if role == 'scheduler' else ''}print(time.process_time())"
    python = ("deploy/" + f"{PREFIX}-{role}", "--", "env", f"PYTHONPATH={PACKAGES}", PYTHON, "-c", look)
    seconds = min(float(release.kubectl("exec", *python)) for _ in range(3))
    print(f"\n{role} loads in {seconds:.2f} s")
    assert seconds < 2


def test_the_control_image_stays_small(cluster: Cluster) -> None:
    """The image is less than 250 MB, unpacked: a gateway may be needed anywhere in a hurry."""
    [line] = [
        line for line in cluster.run("ctr", "images", "ls").splitlines() if f"library/expertmesh-control:{TAG} " in line
    ]
    size, unit = re.search(r" ([0-9.]+) (MiB|GiB) ", line).groups()  # type: ignore[union-attr]
    megabytes = float(size) * {"MiB": 1.048576, "GiB": 1073.741824}[unit]
    print(f"\ncontrol is {megabytes:.0f} MB")
    assert megabytes < 250


def test_an_upgrade_to_other_groups_or_another_model_changes_nothing(installed: Installed) -> None:
    for settings, says in (
        (["experts.groups=3"], "experts.groups is 2 in the installed release, not 3"),
        (["model.source=hostPath", "model.hostPath.path=/models"], "serves the model bundled, not /models"),
    ):
        assert says in installed.release.apply("upgrade", *settings, words=(), check=False)
    assert installed.release.helm("history", NAME).count("deployed") == 1


async def test_an_upgrade_of_every_role_under_load_fails_nothing(installed: Installed) -> None:
    release, key = installed.release, installed.release.key
    before, began = release.uids() - release.uids("redis"), time.monotonic()
    outcome = await release.under_load(lambda: release.apply("upgrade", "commonAnnotations.rolled=again"))
    print(f"\nupgrade in {time.monotonic() - began:.0f} s: {outcome}")
    assert outcome.finished > 10
    until(lambda: before.isdisjoint(release.uids()), 120, "the old pods are gone")
    assert release.key == key  # no upgrade changes a secret


def test_nothing_is_left_but_what_is_meant_to_stay(installed: Installed) -> None:
    release = installed.release
    release.helm("uninstall", NAME, *WAIT)

    def left() -> set[str]:
        found = release.cluster.items(release.namespace, KINDS, "-l", OURS)
        return {f"{each['kind']}/{each['metadata']['name']}" for each in found}

    until(lambda: left() == KEPT, 180, "only the secrets stay")
    names = release.kubectl("get", KINDS, "-o", "name").split()
    assert {name for name in names if "expertmesh" in name or NAME in name} == {each.lower() for each in KEPT}
