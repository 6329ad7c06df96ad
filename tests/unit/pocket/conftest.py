"""``train.py`` as its user runs it, on a small working folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from testkit.pocket.card import make_records
from testkit.pocket.evidence import script as load_script
from testkit.pocket.runs import make_work


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return make_work(tmp_path / "work")


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
