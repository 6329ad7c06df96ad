"""The chart, rendered by the real helm without a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.kube.chart import CHART, Objects, Render, helm_program, named

from services.config import Settings, load_settings

Helm = Callable[..., subprocess.CompletedProcess[str]]


class NoTwice(yaml.SafeLoader):
    """Refuses a key that stands twice, which PyYAML alone takes in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{twice} stands twice: {node.start_mark}"
        return super().construct_mapping(node, deep)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm on a chart with ``settings``: ``path=value``, or an option and its value. The caller looks at the
    result."""
    program = helm_program()

    def run(
        *settings: str,
        command: tuple[str, ...] = ("template", "mesh"),
        chart: Path = CHART,
        options: Iterable[str] = (),
        apis: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        words = [program, *command, str(chart), *options, *(word for api in apis for word in ("--api-versions", api))]
        for setting in settings:
            words += setting.split(" ", 1) if setting.startswith("--") else ["--set", setting]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Objects by kind and name, of ``settings`` over a profile, in a cluster with ``apis``, too."""

    def run(
        *settings: str,
        profile: str | None = "dev",
        release: str = "mesh",
        namespace: str = "there",
        chart: Path = CHART,
        apis: tuple[str, ...] = (),
    ) -> Objects:
        options = ["--namespace", namespace]
        options += ["--values", str(CHART / f"values-{profile}.yaml")] if profile else []
        done = helm(*settings, command=("template", release), chart=chart, options=options, apis=apis)
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.load_all(done.stdout, Loader=NoTwice) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return run


@pytest.fixture(scope="session")
def refused(helm: Helm) -> Callable[..., str]:
    """What helm says of ``settings``, which it must not render."""

    def run(*settings: str) -> str:
        done = helm(*settings)
        assert done.returncode != 0
        return done.stderr

    return run


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """What a process makes of the file of settings that the chart writes for ``role``."""
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://:x@host:6379/0")

    def run(objects: Objects, role: str, process: Any = None) -> Settings:
        file = tmp_path / "config.yaml"
        file.write_text(named(objects, "ConfigMap", role)["data"]["config.yaml"])
        return load_settings(["--config", str(file)], role=process or role)

    return run


@pytest.fixture
def probed(helm: Helm, tmp_path: Path) -> Helm:
    """What helm makes of a ``template`` of ours in the chart. An object of the cluster is played by a value, ``found``,
    for ``helm template`` looks nothing up."""
    folder = shutil.copytree(CHART, tmp_path / "probed")

    def run(
        template: str, found: dict[str, Any], *settings: str, release: str = "mesh", options: Iterable[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        (folder / "templates/probe.yaml").write_text(template)
        values = tmp_path / "found.json"
        values.write_text(json.dumps({"global": {"found": found}}))
        chosen = ["--namespace", "there", "--values", str(values), *options]
        return helm(*settings, command=("template", release), chart=folder, options=chosen)

    return run


@pytest.fixture
def notes(render: Render, tmp_path: Path) -> Callable[..., str]:
    """What helm says after an installation, shown by a chart that has it in an object."""
    folder = shutil.copytree(CHART, tmp_path / "chart")
    (folder / "templates/NOTES.txt").rename(folder / "notes")
    probe = '{kind: Notes, metadata: {name: notes}, text: {{ tpl (.Files.Get "notes") . | quote }}}'
    (folder / "templates/probe.yaml").write_text(probe)
    return lambda *settings, apis=(): str(render(*settings, chart=folder, apis=apis)["Notes", "notes"]["text"])
