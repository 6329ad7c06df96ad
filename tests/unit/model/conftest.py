"""Random tiny checkpoints saved by transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import CONFIGS, QWEN2, save_model


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Each architecture's folder and transformers' model of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(folder, CONFIGS[request.param])


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2-plain")
    save_model(folder, QWEN2)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
