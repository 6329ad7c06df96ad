"""What GitHub runs: each action by its commit, CI by .ci/run, and a release by what this repository has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
MAKEFILE = (ROOT / "Makefile").read_text()


def _jobs(name: str) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((WORKFLOWS / name).read_text())["jobs"])


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_actions_are_named_by_commit_and_version(name: str) -> None:
    used = re.findall(r"^\s*(?:- )?uses: (.+)$", (WORKFLOWS / name).read_text(), re.M)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml", action), (
            action
        )


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_only_what_publishes_may_write(name: str) -> None:
    workflow = yaml.safe_load((WORKFLOWS / name).read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in (WORKFLOWS / name).read_text()
    may_write = {
        job: {right for right, level in said["permissions"].items() if level == "write"}
        for job, said in workflow["jobs"].items()
        if "permissions" in said
    }
    assert may_write == ({"pypi": {"id-token"}, "images": {"packages"}} if name == "release.yml" else {})


def test_a_release_waits_for_ci_which_runs_what_the_repository_says() -> None:
    assert [step.get("run") for step in _jobs("ci.yml")["check"]["steps"]][-1] == "bash .ci/run"
    jobs = _jobs("release.yml")
    assert jobs["check"]["uses"] == "./.github/workflows/ci.yml"
    assert {job: said.get("needs") for job, said in jobs.items()} == {
        "version": None, "check": "version", "dist": "check", "pypi": ["dist", "images"], "images": "check"
    }  # fmt: skip


def test_a_release_builds_by_what_make_has() -> None:
    jobs = _jobs("release.yml")
    assert all(f"\n{target}:" in MAKEFILE for target in jobs["images"]["strategy"]["matrix"]["target"])
    assert "python -m build --no-isolation" in str(jobs["dist"]["steps"])
    assert "$(BIN)/python -m build --no-isolation" in MAKEFILE


def test_versions_stand_where_a_release_looks_for_them() -> None:
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f'\nappVersion: "{version}"\n' in (ROOT / "helm/expertmesh/Chart.yaml").read_text()


@pytest.mark.parametrize("target", ["cluster-test", "fleet-nodes"])
def test_what_needs_a_cluster_says_what_to_name_before_anything_is_installed(target: str) -> None:
    words = ["make", "-C", str(ROOT), "-o", "env", "BIN=/nowhere", target]
    environment = {"PATH": os.environ["PATH"]}
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert "KUBE_TOOL must name a program that runs a cluster" in said.stdout + said.stderr
    assert said.returncode != 0
    assert "/nowhere" not in said.stdout + said.stderr
