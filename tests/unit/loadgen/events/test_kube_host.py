"""Events in a cluster: what kubectl is asked, by a kubectl of ours that notes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.events.host import EventImpossible
from loadgen.events.kube import KubeHost
from loadgen.events.plan import planned

INSTANCE, ROLE, SHARD = "app.kubernetes.io/instance", "app.kubernetes.io/component", "expertmesh.io/shard-group"
KUBECTL = """
import json, sys
from pathlib import Path
here = Path(__file__).parent
with (here / "asked").open("a") as out:
    out.write(json.dumps(sys.argv[1:]) + "\\n")
if "get" in sys.argv:
    print((here / ("pods.json" if "pods" in sys.argv else "workloads.json")).read_text())
elif (here / "refuse").exists():
    sys.exit("Error from server (Forbidden): pods is forbidden")
"""


def called(name: str, role: str, *, group: int | None = None, kind: str = "Pod", **meta: Any) -> dict[str, Any]:
    labels = {INSTANCE: "mesh", ROLE: role} | ({SHARD: str(group)} if group is not None else {})
    return {"kind": kind, "metadata": {"name": name, "labels": labels} | meta}


PODS = [
    called("mesh-expertmesh-attention-b", "attention"),
    called("mesh-expertmesh-attention-a", "attention", deletionTimestamp="2026-11-27T00:00:00Z"),
    called("mesh-expertmesh-experts-0-0", "experts", group=0),
    called("mesh-expertmesh-experts-1-1", "experts", group=1),
    called("mesh-expertmesh-experts-1-0", "experts", group=1),
]
WORKLOADS = [
    called("mesh-expertmesh-attention", "attention", kind="Deployment"),
    called("mesh-expertmesh-experts-1", "experts", group=1, kind="StatefulSet"),
]


@pytest.fixture
def host(tmp_path: Path) -> KubeHost:
    (tmp_path / "kubectl.py").write_text(KUBECTL)
    for name, items in (("pods", PODS), ("workloads", WORKLOADS)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"items": items}))
    return KubeHost("mesh", [sys.executable, str(tmp_path / "kubectl.py"), "--namespace", "there"])


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[], list[str]]:
    """What kubectl was asked last."""

    def last() -> list[str]:
        words: list[str] = json.loads((tmp_path / "asked").read_text().splitlines()[-1])
        return words

    return last


WAYS = {
    "0:kill:experts-1": "delete pod mesh-expertmesh-experts-1-0 --wait=false --grace-period=0 --force",
    "0:drain:experts": "delete pod mesh-expertmesh-experts-0-0 --wait=false",
    "0:drain:mesh-expertmesh-experts-1-1": "delete pod mesh-expertmesh-experts-1-1 --wait=false",
    "0:kill:attention": "delete pod mesh-expertmesh-attention-b --wait=false --grace-period=0 --force",
    "0:scale:attention=3": "scale deployment/mesh-expertmesh-attention --replicas=3",
    "0:scale:experts-1=0": "scale statefulset/mesh-expertmesh-experts-1 --replicas=0",
}


@pytest.mark.parametrize("event", WAYS)
async def test_it_asks_kubectl(host: KubeHost, asked: Callable[[], list[str]], event: str) -> None:
    said = await host.act(planned(event))
    assert asked() == ["--namespace", "there", *WAYS[event].split()]
    assert said == await host.find(planned(event))
    assert said.removeprefix("pod ") in WAYS[event]


async def test_only_the_release_is_looked_at(host: KubeHost, asked: Callable[[], list[str]]) -> None:
    await host.find(planned("0:kill:experts"))
    assert asked()[2:] == ["get", "pods", "-l", "app.kubernetes.io/instance=mesh", "-o", "json"]


async def test_what_is_not_there_is_said_with_what_is(host: KubeHost) -> None:
    with pytest.raises(EventImpossible, match="Release mesh has no workload experts-9") as caught:
        await host.find(planned("0:scale:experts-9=1"))
    names = "attention, experts, experts-1, mesh-expertmesh-attention, mesh-expertmesh-experts-1"
    assert caught.value.message.endswith(f" There are {names}.")
    with pytest.raises(EventImpossible, match="A pod cannot be paused"):
        await host.find(planned("0:pause:gateway=1s"))


async def test_what_kubectl_says_is_the_reason(host: KubeHost, tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(EventImpossible, match=r"Error from server \(Forbidden\): pods is forbidden"):
        await host.act(planned("0:kill:experts"))


async def test_without_kubectl_it_says_so() -> None:
    with pytest.raises(EventImpossible, match="no-such-kubectl cannot be started: No such file or directory"):
        await KubeHost("mesh", ["no-such-kubectl"]).find(planned("0:kill:experts"))
