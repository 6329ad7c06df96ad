"""The dense part by its kernels, in Triton's interpreter, gives what it gives in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import CONFIGS, ServingPath, save_model
from torch import Tensor

from moe_kernels import backend

PROMPTS = ([5, 17, 80, 3, 9, 44], [61, 2, 33])


def logits_of(folder: Path, path: backend.Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A step with two prompts, one with a prompt's rest and a decode, one of two decodes. Experts run in torch."""
    serving = ServingPath(folder)
    dispatch = serving.link.dispatch

    def dispatch_in_torch(*given: Any) -> Any:
        with backend.forced("torch"):
            return dispatch(*given)

    monkeypatch.setattr(serving.link, "dispatch", dispatch_in_torch)
    with backend.forced(path):
        first, second = (serving.start(prompt) for prompt in PROMPTS)
        serving.step([(first, 3), (second, 1)])
        serving.step([(first, 2), (second, 1)])
        serving.step([(first, 1), (second, 1)])
    return [torch.cat(run.logits) for run in (first, second)]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-mixed-layers",
        "qwen3-one-kv-head",
        "qwen2-renormalised",
        "mixtral-window",
        "olmoe-clipped",
        "glm4-groups",
        "minimax",
        "exaone",
        "ernie",
        "gpt-oss",
        "gpt-oss-layers",
        "deepseek3",
    ],
)
def test_logits_are_those_of_plain_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, CONFIGS[name])
    expected = logits_of(tmp_path, "torch", monkeypatch)
    found = logits_of(tmp_path, "triton", monkeypatch)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.argmax(dim=1), other.argmax(dim=1))
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert not torch.equal(one, other), "both ran in plain torch"
