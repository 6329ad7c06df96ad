"""The chart, rendered by the real helm without a cluster."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, Objects, Render, helm_program


class NoTwice(yaml.SafeLoader):
    """Refuses a key that stands twice, which PyYAML alone takes in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{twice} stands twice: {node.start_mark}"
        return super().construct_mapping(node, deep)


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm; the caller looks at the result."""
    program = helm_program()
    return lambda *words: subprocess.run([program, *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Objects by kind and name, of ``settings`` (``path=value``) over a profile, in a cluster with ``apis``, too."""

    def run(
        *settings: str,
        profile: str | None = "dev",
        release: str = "mesh",
        namespace: str = "there",
        chart: Path = CHART,
        apis: tuple[str, ...] = (),
    ) -> Objects:
        words = ["template", release, str(chart), "--namespace", namespace]
        words += [word for api in apis for word in ("--api-versions", api)]
        words += ["--values", str(Path(CHART) / f"values-{profile}.yaml")] if profile else []
        done = helm(*words, *(word for setting in settings for word in ("--set", setting)))
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.load_all(done.stdout, Loader=NoTwice) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return run


@pytest.fixture
def notes(render: Render, tmp_path: Path) -> Callable[..., str]:
    """What helm says after an installation, shown by a chart that has it in an object."""
    folder = shutil.copytree(CHART, tmp_path / "chart")
    (folder / "templates/NOTES.txt").rename(folder / "notes")
    probe = '{kind: Notes, metadata: {name: notes}, text: {{ tpl (.Files.Get "notes") . | quote }}}'
    (folder / "templates/probe.yaml").write_text(probe)
    return lambda *settings, apis=(): str(render(*settings, chart=folder, apis=apis)["Notes", "notes"]["text"])
