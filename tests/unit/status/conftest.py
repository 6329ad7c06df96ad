"""A release as the API server lists it, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.kube.api_server import ApiServer, pod, running_api_server, workload

from services.cli.main import main


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ApiServer]:
    """A release with two shard groups, all well, as the kubeconfig's context has it."""
    with running_api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        server.lists = {
            "deployments": [workload(role, 1, 1) for role in ("gateway", "scheduler", "attention")],
            "statefulsets": [workload("redis", 1, 1), *(workload("experts", 1, 1, group) for group in range(2))],
            "pods": [pod(f"mesh-{role}-0", role) for role in ("redis", "gateway", "scheduler", "attention")]
            + [pod(f"mesh-experts-{group}-0", "experts", group) for group in range(2)],
            "jobs": [],
            "events": [],
        }
        yield server


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str], temporary: Path) -> Callable[..., Any]:  # noqa: ARG001
    """`expertmesh status` where no server runs, which must end with ``code``: what it says, ``.out`` and ``.err``."""

    def run(code: int, *argv: str) -> Any:
        assert main(["status", *argv]) == code
        return capsys.readouterr()

    return run
