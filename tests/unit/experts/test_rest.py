"""What a loader keeps of its last group while the model sleeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.checkpoints import save_checkpoint

from services.config import Settings
from services.errors import CheckpointError
from services.experts.serving import Loader, TcpServing
from services.model.load_spec import load_spec
from services.model.weights_sample import with_weights
from services.routing import ShardGroup, even_groups


class Group:
    """A loader with a checkpoint of its own, and what it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_checkpoint(folder / "model", "qwen2_moe")
        (secret := folder / "secret").write_bytes(b"0123456789abcdef" * 2)
        spec = with_weights(load_spec(self.folder), self.folder)
        settings = Settings(
            model=self.folder, fabric_secret_file=secret, dtype="float32", enable_sleep_mode=True, fabric_lane="tcp"
        )
        how = {"dtype": torch.float32, "device": torch.device("cpu"), "version": "0"}
        self.loader = Loader(settings, spec, worker="e", **how)  # type: ignore[arg-type]
        self.group: ShardGroup
        (self.group,) = even_groups(list(spec.moe_layers), spec.num_experts, 1)
        self.serving: TcpServing | None = None

    def load(self) -> None:
        self.serving = self.loader(self.group, 1, threading.Event())

    def drain(self) -> None:
        if self.serving is not None:
            self.serving.drain(0.0)
        self.serving = None


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.drain()


def test_a_deeper_sleep_gives_back_what_a_lighter_one_kept(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in pinned memory, too: dropping them leaves it with torch."""
    group.load()
    group.drain()
    kept = group.loader._kept
    assert kept is not None
    freed: list[bool] = []
    monkeypatch.setattr(kept.memory, "free", lambda *, keep: freed.append(keep))
    group.loader.rest(1)
    group.loader.rest(2)
    assert freed == [True, False]
    assert group.loader._kept is None


def test_after_a_deep_sleep_another_checkpoint_is_not_served(group: Group) -> None:
    group.load()
    for level in (1, 2):
        group.drain()
        group.loader.rest(level)
        group.load()
    group.drain()
    group.loader.rest(2)
    for file in group.folder.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        group.load()
