"""A real cluster of one node, by the program in KUBE_TOOL, and the commands on it: kubectl, helm, builds of images."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.kube.chart import NAME, ROOT, chart_words, helm_program

DOCKERFILE = "helm/images/Dockerfile"
IMAGES = {
    "expertmesh-control": ["-f", DOCKERFILE, "--target", "control", "."],
    "expertmesh-worker-cpu": ["-f", DOCKERFILE, "--target", "worker-cpu", "."],
    "expertmesh-redis": ["-f", "tests/cluster/redis.Dockerfile", "tests/cluster"],
}
"""Name -> what the build takes."""
TAG = os.environ.get("KUBE_TAG", "dev")
"""Tag of the images; trees that share a cluster differ in it."""
LOCAL = (
    *(f"images.control.tag={TAG}", f"images.worker.tag={TAG}"),
    *("images.redis.repository=expertmesh-redis", f"images.redis.tag={TAG}", "images.redis.digest="),
)
"""Values for images that were built here."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""A container's context that pod security `restricted` lets in."""
STEP_S = 900


class CommandFailed(AssertionError):
    """A command ended with another code than 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Commands on a running cluster. ``environment`` names its configuration."""

    tool: str
    environment: dict[str, str]

    def run(self, *words: str, text: str | None = None, check: bool = True, timeout_s: float = STEP_S) -> str:
        """Output of a command; where it may fail (``check`` False) its errors too."""
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment,
            cwd=ROOT,
        )
        if check and done.returncode:
            raise CommandFailed(f"{shlex.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout if check else done.stdout + done.stderr

    def kubectl(self, *words: str, text: str | None = None, check: bool = True, timeout_s: float = STEP_S) -> str:
        return self.run("kubectl", *words, text=text, check=check, timeout_s=timeout_s)

    def helm(self, *words: str, check: bool = True) -> str:
        return self.run(helm_program(), *words, check=check)

    def get(self, namespace: str, *what: str) -> Any:
        """Objects as JSON."""
        return json.loads(self.kubectl("-n", namespace, "get", *what, "-o", "json"))

    def items(self, namespace: str, *what: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(namespace, *what)["items"]
        return found

    def secret(self, namespace: str, name: str, key: str) -> str:
        return base64.b64decode(self.get(namespace, "secret", name)["data"][key]).decode()

    def build_images(self) -> dict[str, float]:
        """Seconds that each took."""
        took = {}
        for name, words in IMAGES.items():
            began = time.monotonic()
            self.run(self.tool, "build", "-t", f"{name}:{TAG}", *words)
            took[name] = time.monotonic() - began
        return took

    @contextmanager
    def namespace(self, name: str, level: str = "restricted") -> Iterator[str]:
        """A namespace in which pod security ``level`` is enforced; gone afterwards, unless KUBE_KEEP is set."""
        labels = {"pod-security.kubernetes.io/enforce": level}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.kubectl("apply", "-f", "-", text=json.dumps(body))
        try:
            yield name
        finally:
            if not os.environ.get("KUBE_KEEP"):
                self._remove(name)

    def _remove(self, namespace: str) -> None:
        """Delete a namespace, its pods at once: else they would wait for one another to drain."""
        self.kubectl("delete", "namespace", namespace, "--wait=false", check=False)
        everything = ("pods", "--all", "--force", "--grace-period=0", "--wait=false")
        self.kubectl("-n", namespace, "delete", *everything, check=False)
        self.kubectl(
            "delete", "namespace", namespace, "--wait=true", "--timeout=120s", "--ignore-not-found", check=False
        )

    def claim(self, namespace: str, name: str) -> None:
        """A claim of the name that a StatefulSet will look for, open to its user."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(body))
        self.opened(namespace, name)

    def opened(self, namespace: str, claim: str) -> Path:
        """The folder behind a claim, opened to all users: this cluster's provisioner knows no fsGroup."""
        until(lambda: self.get(namespace, "pvc", claim)["status"]["phase"] == "Bound", 60, f"{claim} is bound")
        volume = self.get(namespace, "pvc", claim)["spec"]["volumeName"]
        folder = Path(self.get(namespace, "pv", volume)["spec"]["hostPath"]["path"])
        folder.chmod(0o777)
        return folder

    def chart(self, profile: str, *settings: str) -> list[str]:
        """Words after `helm install NAME`, `helm upgrade NAME`: the chart with images that were built here."""
        return chart_words(profile, *LOCAL, *settings)

    def rendered(self, namespace: str, profile: str, *settings: str, words: Sequence[str] = ()) -> str:
        """The chart as it ships, as text."""
        return self.helm("template", NAME, *chart_words(profile, *settings), "--namespace", namespace, *words)

    def dry_run(self, namespace: str, text: str, *words: str, check: bool = True) -> str:
        """What the API server says of objects that it does not keep."""
        asked = ("apply", "--dry-run=server", *words, "-f", "-")
        return self.kubectl("-n", namespace, *asked, text=text, check=check)


def started(tool: str) -> tuple[Cluster, bool]:
    """The cluster, and whether it ran before."""
    before = Path(os.environ.get("KUBE_HOME", "/var/tmp/kube-one"), "run/kubelet.pid").exists()
    subprocess.run([tool, "up", "--prometheus"], check=True, timeout=STEP_S, capture_output=True, text=True)
    lines = subprocess.run([tool, "env"], check=True, timeout=60, capture_output=True, text=True).stdout
    script = f"{lines}\nenv -0"
    output = subprocess.run(["bash", "-c", script], check=True, timeout=60, capture_output=True, text=True).stdout
    environment = dict(line.split("=", 1) for line in output.split("\0") if "=" in line)
    return Cluster(tool=tool, environment=environment), before


def until(condition: Callable[[], object], seconds: float, what: str, every_s: float = 0.5) -> float:
    """Seconds until ``condition`` held; it may fail with CommandFailed meanwhile."""
    began, last = time.monotonic(), ""
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except CommandFailed as error:
            last = f": {error}"
        assert time.monotonic() - began < seconds, f"waited {seconds} s in vain: {what}{last}"
        time.sleep(every_s)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns, aligned."""
    texts = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
