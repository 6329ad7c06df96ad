"""A deployment of separate roles whose parts can be made slow, two tenants, and Prometheus with the shipped rules."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from testkit.fabric import slow
from testkit.kube.prometheus import Prometheus
from testkit.pocket.answers import POCKET
from testkit.processes.cluster import Cluster, Here, Shape
from testkit.processes.servers import bench, free_port
from testkit.waiting import until

from chaos.tenants import Tenant, key_file

SHAPE = Shape(attention=2, experts=4, groups=4, schedulers=2)
"""``experts-N`` is the only seat of shard group N."""
RELEASE = "drill"
KV_BLOCKS = 256
SPARE = "experts-4"
"""An expert worker that is started by nobody but a cure."""
_SITE = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(__file__))
from services.model.experts import ExpertShard
import slow
fast, file = ExpertShard.forward, Path(os.environ["SLOW_ROW_FILE"])
def forward(shard, layer, x, ids, weights):
    row_s = float(file.read_text()) if file.exists() else 0.0
    return slow.slow(fast.__get__(shard), row_s=row_s)(layer, x, ids, weights)
ExpertShard.forward = forward
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRows:
    """Experts of a process take as long for each row as its file says; Python runs ``sitecustomize`` as it starts."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> SlowRows:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)
        (folder / "slow.py").write_text(Path(slow.__file__).read_text())
        return cls(folder=folder)

    def take(self, seconds: float, *names: str) -> None:
        for name in names:
            part = self.folder / f"{name}.part"
            part.write_text(str(seconds))
            part.replace(self.folder / name)

    def environment(self, name: str) -> list[str]:
        return ["env", f"PYTHONPATH={self.folder}:{':'.join(sys.path)}", f"SLOW_ROW_FILE={self.folder / name}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped(Here):
    """This machine, with words before each command."""

    words: tuple[str, ...] = ()

    def command(self, args: Sequence[str]) -> list[str]:
        return [*self.words, *args]


@dataclass(kw_only=True, slots=True)
class Night:
    """A deployment, its clients and what watches it."""

    cluster: Cluster
    rows: SlowRows
    steady: Tenant
    flood: Tenant
    prometheus: Prometheus
    began: float = field(default_factory=time.time)
    hot_group: int = 0
    """The shard group that the prompts of :func:`expert_hot` go to."""

    def say(self, line: str) -> None:
        print(f"{time.time() - self.began:7.1f} s  {line}", flush=True)

    def alerts(self) -> dict[str, str]:
        """States (pending, firing) by the names of the alerts that are not quiet."""
        found: dict[str, str] = {}
        response = httpx.get(f"{self.prometheus.url}/api/v1/alerts", timeout=10).raise_for_status()
        for alert in response.json()["data"]["alerts"]:
            labels = alert["labels"]
            name = labels["alertname"]
            if labels.get("app_kubernetes_io_instance", RELEASE) != RELEASE:
                continue  # of another server on this machine, which `observe` finds, too
            found[name] = "firing" if "firing" in (alert["state"], found.get(name)) else alert["state"]
        return found


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Night]:
    """A deployment of its own, whole and watched. It asks for keys, and its replicas are at their most."""
    tenants = {tenant: f"sk-{secrets.token_hex(12)}" for tenant in ("steady", "flood")}
    rows = SlowRows.made(folder / "slow")
    of_role: dict[str, dict[str, object]] = {
        "gateway": {"auth": "required", "api_keys_file": key_file(folder / "keys.yaml", tenants)},
        "scheduler": {"autoscale": "on", "max_replicas": 1},
        "attention": {"kv_blocks": KV_BLOCKS},
    }

    def place(name: str) -> Wrapped:
        return Wrapped(name=name, words=tuple(rows.environment(name)) if name.startswith("experts") else ())

    with bench(folder) as stage:
        cluster = Cluster(stage, place, POCKET / "model", SHAPE, lambda member: _options(member, of_role))
        cluster.start()
        cluster.reserve(SPARE, place(SPARE))
        url = cluster.server.url
        with watched(cluster, folder) as prometheus:
            yield Night(
                cluster=cluster,
                rows=rows,
                steady=Tenant(url=url, key=tenants["steady"], seed=1),
                flood=Tenant(url=url, key=tenants["flood"], seed=2),
                prometheus=prometheus,
            )


def _options(member: str, of_role: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    role, _, number = member.partition("-")
    return {"expert_group": number} if role == "experts" else dict(of_role.get(role, {}))


@contextlib.contextmanager
def watched(cluster: Cluster, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the shipped rules, and the pages of all members as one release."""
    targets = [f"127.0.0.1:{port}" for member in cluster.members.values() for port in member.ports.values()]
    web, port = free_port(), free_port()
    words = ["--port", str(web), "--prometheus-port", str(port), "--data", str(folder / "prometheus")]
    command = [sys.executable, "-m", "services", "observe", *words, "--release", RELEASE, "--target", *targets]
    with (folder / "observe.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{url}/-/ready"), "Prometheus is ready", limit_s=60, every_s=0.2)
        yield Prometheus(url=url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False
