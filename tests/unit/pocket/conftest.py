"""``train.py`` and ``data.py`` as their user runs them, and the small folders that they and others work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from testkit.pocket.card import make_records
from testkit.pocket.evidence import make_evidence, make_models
from testkit.pocket.evidence import script as load_script
from testkit.pocket.packages import write_packages
from testkit.pocket.runs import make_work


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return make_work(tmp_path / "work")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with text, and with models trained for a moment. Tests that use it write elsewhere."""
    folder = make_evidence(tmp_path_factory.mktemp("toy") / "work")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return load_script("train")


@pytest.fixture
def train(script: ModuleType, work: Path) -> Callable[..., int]:
    """The command line, with steps of 256 tokens."""

    def run(name: str, *options: str, smoke: bool = True) -> int:
        code: int = script.main(["--work", str(work), "--run", name, *(["--smoke"] if smoke else []), *options])
        return code

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a record of every kind."""
    return make_records(tmp_path / "example")


@pytest.fixture
def gather(tmp_path: Path) -> Callable[..., int]:
    """``data.py`` with made-up packages in ``tmp_path``, without a network."""
    sources, data = write_packages(tmp_path), load_script("data")

    def run(*options: str) -> int:
        fixed = ["--work", str(tmp_path), "--offline", "--sources", str(sources), "--vocab", "300"]
        code: int = data.main([*fixed, *options])
        return code

    return run
