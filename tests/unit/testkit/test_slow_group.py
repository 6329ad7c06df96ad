"""What makes a group of a cluster slow, run here beside experts that do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from testkit.fabric.slow_group import slow_group, slow_rows

EXPERTS = """
class ExpertShard:
    def __init__(self, name):
        self.name = name

    def forward(self, layer, x_TD, ids_TK, weights_TK):
        return self.name, layer, len(x_TD)
"""
LOOK = """
import time
from services.model.experts import ExpertShard
began = time.perf_counter()
print(*ExpertShard("mine").forward(3, [0.0] * 4, None, None), time.perf_counter() - began)
"""


class Kubectl:
    """Keeps what is applied."""

    def kubectl(self, *words: str, text: str) -> None:
        assert "apply" in words
        self.applied: dict[str, Any] = json.loads(text)


def test_a_pod_with_the_mounted_files_takes_its_time_for_each_row(tmp_path: Path) -> None:
    cluster = Kubectl()
    slow_rows(cluster, "there")  # type: ignore[arg-type]
    words = dict(word.split("=", 1) for word in slow_group(1, 0.05) if word != "--set-json")
    env = {each["name"]: each["value"] for each in json.loads(words["experts.perGroup.1.extraEnv"])}
    [mount] = json.loads(words["experts.perGroup.1.extraVolumeMounts"])
    mounted, worker = tmp_path / "mounted", tmp_path / "worker"
    (worker / "services/model").mkdir(parents=True)
    for package in ("services", "services/model"):
        (worker / package / "__init__.py").touch()
    (worker / "services/model/experts.py").write_text(EXPERTS)
    mounted.mkdir()
    for name, content in cluster.applied["data"].items():
        (mounted / name).write_text(content)
    path = env["PYTHONPATH"].replace(mount["mountPath"], str(mounted)).replace("/opt/worker", str(worker))
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env=env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    *said, seconds = done.stdout.split()
    assert said == ["mine", "3", "4"]
    assert 4 * 0.05 <= float(seconds) < 2
