"""What `expertmesh plan` says to install on several nodes: the chart takes it, and workers read what was planned."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from testkit.kube.chart import ROOT, Objects, container, helm_program, named
from testkit.pocket.answers import POCKET

from services.cli.main import main
from services.config import Settings

SHAPES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SHAPES |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Objects]:
    """Objects by kind and name that the command of a plan makes, for a model of 60 GB."""
    config = json.loads((POCKET / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | SHAPES))

    def run(*words: str) -> Objects:
        assert main(["plan", str(tmp_path), *words]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        helm, install, *rest = shlex.split(line)
        assert (helm, install) == ("helm", "install")
        command = [helm_program(), "template", *rest, "--api-versions", "leaderworkerset.x-k8s.io/v1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.safe_load_all(done.stdout) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return run


def test_disaggregated(planned: Callable[..., Objects], read: Callable[..., Settings]) -> None:
    objects = planned("--gpus", "16", "--nodes", "4", "--gpu", "l40s", "--tokens", "256")
    attention = named(objects, "Deployment", "attention")["spec"]["replicas"]
    groups = [name for kind, name in objects if kind == "StatefulSet" and "experts" in name]
    assert attention + len(groups) == 16
    settings = read(objects, "attention")
    assert (settings.layout, settings.overlap, settings.kv_memory_gib) == ("disaggregated", "on", 38)
    assert settings.max_num_seqs == -(-256 // attention)


def test_local(planned: Callable[..., Objects], read: Callable[..., Settings]) -> None:
    objects = planned("--gpus", "4", "--nodes", "2", "--tokens", "4096", "--context", "512", "--across-us", "500")
    assert named(objects, "Deployment", "attention")["spec"]["replicas"] == 4
    settings = read(objects, "attention")
    assert (settings.layout, settings.max_num_seqs) == ("local", 1024)
    assert settings.max_num_batched_tokens == 1024 + 2048


def test_colocated(planned: Callable[..., Objects], read: Callable[..., Settings]) -> None:
    slow = ("--across-us", "50000")
    objects = planned("--gpus", "8", "--nodes", "2", "--gpu", "l40s", "--tokens", "16", *slow)
    assert named(objects, "Deployment", "attention")["spec"]["replicas"] == 2
    assert container(objects, "attention")["resources"]["limits"]["nvidia.com/gpu"] == 4
    settings = read(objects, "attention", "colocated")
    assert (settings.layout, settings.workers, settings.expert_groups) == ("colocated", 4, 2)
    assert (settings.max_num_seqs, settings.kv_memory_gib) == (2, 11)


def test_lockstep(planned: Callable[..., Objects]) -> None:
    fast = ("--across-us", "1", "--lockstep-us", "1", "--across-gb", "1")
    objects = planned("--gpus", "4", "--nodes", "4", "--gpu", "l40s", "--tokens", "1", *fast)
    found = named(objects, "LeaderWorkerSet", "attention")["spec"]
    assert (found["replicas"], found["leaderWorkerTemplate"]["size"]) == (2, 2)
