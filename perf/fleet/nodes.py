"""The chart on hundreds of fake nodes (kwok): objects, Helm's release, time to install, spread, KEDA, the API's load.

    KUBE_TOOL=path/to/kube PYTHONPATH=.:tests .venv/bin/python -m perf.fleet.nodes --nodes 500 --groups 64

Real are the API server, the controllers, the scheduler of pods and KEDA; pods on fake nodes run nothing and are ready
at once. Needs a cluster by KUBE_TOOL, which goes on running afterwards without the fake nodes and the release.
``--scaled``: with ScaledObjects, for which a real pod publishes what is wanted, as a leading scheduler would; then it
wants a quarter more of some groups. ``--release-only``: no nodes, just the release's size.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from testkit.kube.chart import CHART
from testkit.kube.cluster import IMAGES, TAG, Cluster, started

NAMESPACE, RELEASE = "fleet-nodes", "mesh"
LIMIT_BYTES = 1 << 20
"""Limit of a Secret, and so of what Helm keeps of a release."""
LEADER, PYTHON, COUNTS = "leader", "/opt/expertmesh/bin/python", "/tmp/counts"
_PAGE = f'''
import http.server, json, pathlib

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        rows = json.loads(pathlib.Path("{COUNTS}").read_text())
        line = 'expertmesh_wanted_replicas{{role="%s",shard="%s"}} %d\\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(line % tuple(row) for row in rows).encode())

    def log_message(self, *words):
        pass

http.server.ThreadingHTTPServer(("", 9100), Page).serve_forever()
'''
GROWN, SCALED_S = 10, 180.0
WATCHED = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Profile multi-node with everything on fake nodes."""
    fake = {
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
    }
    values: dict[str, Any] = {role: dict(fake) for role in ("gateway", "scheduler", "attention", "experts", "redis")}
    values["experts"] |= {"groups": args.groups, "replicas": args.replicas}
    values["attention"] |= {"replicas": args.attention}
    values["gateway"] |= {"replicas": args.gateways}
    values["redis"] |= {"persistence": {"enabled": False}}
    values["model"] = {"name": "m", "source": "hostPath", "hostPath": {"path": "/models/m"}}
    values["model"]["pvc"] = {"prefetch": {"enabled": False}}
    if args.scaled:
        url = "http://prometheus.monitoring.svc:9090"
        minimum = {"experts": args.replicas, "attention": args.attention, "gateway": args.gateways}
        bounds = {role: {"minReplicas": count, "maxReplicas": max(64, count)} for role, count in minimum.items()}
        prometheus = {"serverAddress": url, "matchers": f'namespace="{NAMESPACE}",pod="{LEADER}"'}
        values["autoscaling"] = {"enabled": True, "prometheus": prometheus, **bounds}
    return values


def _more(replicas: int) -> int:
    """More replicas, by more than the tenth that an autoscaler tolerates."""
    return replicas + max(1, replicas // 4)


def _leader() -> list[dict[str, Any]]:
    """The pod that says what is wanted, and the monitor that has it asked."""
    labels = {"fleet": LEADER}
    pod = {
        "containers": [
            {
                "name": LEADER,
                "image": f"expertmesh-control:{TAG}",
                "command": [PYTHON, "-c", _PAGE],
                "ports": [{"name": "metrics", "containerPort": 9100}],
            }
        ]
    }
    endpoint = {"port": "metrics", "interval": "2s"}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": LEADER, "labels": labels}, "spec": pod},
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {"name": LEADER},
            "spec": {"selector": {"matchLabels": labels}, "podMetricsEndpoints": [endpoint]},
        },
    ]


class Load:
    """CPU seconds and memory of the control plane's processes."""

    def __init__(self) -> None:
        self._processes = {p.name(): p for p in psutil.process_iter(["name"]) if p.name() in WATCHED}
        self._before = self._cpu()
        self._began = time.monotonic()

    def _cpu(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def figures(self) -> dict[str, Any]:
        wall, now = time.monotonic() - self._began, self._cpu()
        return {
            name: {
                "cpu_share": round((now[name] - self._before[name]) / wall, 2),
                "mb": round(process.memory_info().rss / 1e6),
            }
            for name, process in self._processes.items()
        }


class Nodes:
    def __init__(self, cluster: Cluster, args: argparse.Namespace) -> None:
        self._cluster, self._args = cluster, args
        self.found: dict[str, Any] = {}

    def show(self, name: str, figures: Any) -> None:
        self.found[name] = figures
        print(name, json.dumps(figures), flush=True)

    def make(self) -> None:
        began = time.monotonic()
        self._cluster.run(self._cluster.tool, "nodes", str(self._args.nodes), "8")
        self.show("nodes", {"count": self._args.nodes, "seconds": round(time.monotonic() - began, 1)})

    def install(self) -> None:
        values = Path(f"/tmp/{NAMESPACE}.json")
        values.write_text(json.dumps(_values(self._args)))
        chart = self._args.chart
        words = [RELEASE, str(chart), "-n", NAMESPACE, "-f", str(chart / "values-multi-node.yaml"), "-f", str(values)]
        began = time.monotonic()
        self._cluster.helm("install", *words, "--no-hooks", "--timeout", "9m")
        took = time.monotonic() - began
        lines = self._cluster.helm("get", "manifest", RELEASE, "-n", NAMESPACE).splitlines()
        objects = Counter(line.removeprefix("kind: ") for line in lines if line.startswith("kind: "))
        secret = self._cluster.get(NAMESPACE, "secret", f"sh.helm.release.v1.{RELEASE}.v1")
        size = len(base64.b64decode(secret["data"]["release"]))
        self.show("objects", {"total": sum(objects.values()), **objects})
        self.show(
            "helm", {"install_s": round(took, 1), "release_bytes": size, "of_limit": round(size / LIMIT_BYTES, 2)}
        )

    def wait_ready(self) -> None:
        """Wait until every pod is ready, or the time is over."""
        args = self._args
        wanted = args.groups * args.replicas + args.attention + args.gateways + 3
        began, load, ready = time.monotonic(), Load(), 0
        while ready < wanted and time.monotonic() - began < args.within_s:
            time.sleep(5)
            ready = self._ready()
            print(f"  {time.monotonic() - began:.0f} s: {ready} of {wanted} pods ready", flush=True)
        took = round(time.monotonic() - began, 1)
        self.show("ready", {"pods": ready, "wanted": wanted, "seconds": took, "load": load.figures()})

    def _ready(self) -> int:
        path = "jsonpath={range .items[*]}{.status.readyReplicas}{'\\n'}{end}"
        lines = self._cluster.kubectl("-n", NAMESPACE, "get", "statefulsets,deployments", "-o", path).split()
        return sum(map(int, lines))

    def spread(self) -> None:
        path = "jsonpath={range .items[*]}{.spec.nodeName} {.metadata.labels}{'\\n'}{end}"
        lines = self._cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", path).splitlines()
        placed = [(node, json.loads(labels)) for node, _, labels in (line.partition(" ") for line in lines) if node]
        of_node = Counter(node for node, _ in placed)
        shard = [(node, number) for node, labels in placed if (number := labels.get("expertmesh.io/shard-group"))]
        same = Counter(shard)
        figures = {
            "pods": len(placed),
            "nodes_used": len(of_node),
            "pods_of_a_node": [min(of_node.values()), max(of_node.values())],
            "most_replicas_of_a_group_on_a_node": max(same.values(), default=0),
        }
        self.show("spread", figures)

    def rest(self, seconds: float) -> None:
        load = Load()
        time.sleep(seconds)
        self.show("at rest", load.figures())

    def scaled(self) -> None:
        """Wait until all ScaledObjects are ready, then until KEDA has followed a wanted number that is larger."""
        cluster, args = self._cluster, self._args
        cluster.run(cluster.tool, "build", "-t", f"expertmesh-control:{TAG}", *IMAGES["expertmesh-control"])
        for each in _leader():
            cluster.kubectl("-n", NAMESPACE, "apply", "-f", "-", text=json.dumps(each))
        cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", f"pod/{LEADER}", "--timeout=120s")
        groups = {("experts", str(number)): args.replicas for number in range(args.groups)}
        counts = {**groups, ("attention", ""): args.attention, ("gateway", ""): args.gateways}
        began, load = time.monotonic(), Load()
        self._want(counts)
        self._until("ready", lambda: self._states()["True"], len(counts), began)
        hpas = len(cluster.items(NAMESPACE, "hpa"))
        self.show("keda", {"ready": self._states(), "hpas": hpas, "seconds": round(time.monotonic() - began, 1)})
        began = time.monotonic()
        more = {("experts", str(number)): _more(args.replicas) for number in range(GROWN)}
        self._want(counts | more)
        first = self._until("grown", self._grown, 1, began)
        last = self._until("grown", self._grown, GROWN, began)
        self.show("a quarter more of some groups", {"groups": self._grown(), "first_s": first, "all_s": last})
        self.show("meanwhile", load.figures())

    def _want(self, counts: dict[tuple[str, str], int]) -> None:
        text = json.dumps([[role, shard, count] for (role, shard), count in counts.items()])
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        self._cluster.kubectl("-n", NAMESPACE, "exec", LEADER, "--", PYTHON, "-c", write, COUNTS, text)

    def _until(self, what: str, count: Callable[[], int], wanted: int, began: float) -> float:
        """Seconds, or all there are."""
        while (found := count()) < wanted and time.monotonic() - began < SCALED_S:
            print(f"  {time.monotonic() - began:.0f} s: {found} of {wanted} {what}", flush=True)
            time.sleep(2)
        return round(time.monotonic() - began, 1)

    def _states(self) -> Counter[str]:
        path = "jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
        return Counter(self._cluster.kubectl("-n", NAMESPACE, "get", "scaledobjects", "-o", path).split())

    def _grown(self) -> int:
        path = "jsonpath={range .items[*]}{.spec.replicas}{'\\n'}{end}"
        found = self._cluster.kubectl("-n", NAMESPACE, "get", "statefulsets", "-o", path).split()
        return found.count(str(_more(self._args.replicas)))

    def away(self) -> None:
        began = time.monotonic()
        with suppress(AssertionError):
            self._cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--no-hooks")
        kubectl = self._cluster.kubectl
        kubectl("-n", NAMESPACE, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false", check=False)
        kubectl("delete", "namespace", NAMESPACE, "--wait=true", "--timeout=200s", check=False)
        if not self._args.release_only:
            self._cluster.run(self._cluster.tool, "nodes", "0")
        self.show("away", {"seconds": round(time.monotonic() - began, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=31)
    parser.add_argument("--attention", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--within-s", type=float, default=300.0, help="for pods to be ready")
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--release-only", action="store_true")
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was made is taken away at any end
    cluster, _ = started(os.environ["KUBE_TOOL"])
    nodes = Nodes(cluster, args)
    try:
        if not args.release_only:
            nodes.make()
        cluster.kubectl("create", "namespace", NAMESPACE)
        nodes.install()
        if not args.release_only:
            nodes.wait_ready()
            nodes.spread()
            nodes.rest(20)
            if args.scaled:
                nodes.scaled()
    finally:
        nodes.away()
        if args.json:
            args.json.write_text(json.dumps(nodes.found, indent=1))


if __name__ == "__main__":
    main()
