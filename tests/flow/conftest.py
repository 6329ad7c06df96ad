"""Servers for all tests that only talk to them: a small one, and one with the pocket model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.models.checkpoints import save_checkpoint
from testkit.pocket.answers import POCKET
from testkit.processes.servers import Server, bench


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3_moe checkpoint, float32."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_moe", seed=3)


@pytest.fixture(scope="session")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with bench(tmp_path_factory.mktemp("server")) as stage:
        yield stage.serve(tiny, served_model_name="tiny", dtype="float32", kv_blocks=512)


@pytest.fixture(scope="session")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The pocket model, everything in one attention worker."""
    with bench(tmp_path_factory.mktemp("pocket")) as stage:
        yield stage.serve(POCKET / "model", served_model_name="pocket", dtype="float32", threads=1)
