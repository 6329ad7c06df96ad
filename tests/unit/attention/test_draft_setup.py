"""Draft models as a worker loads them: of each family, what drafts is what its checkpoint means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.models.checkpoints import save_checkpoint
from testkit.models.engines import ask, run, tokens
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS

from services.attention.setup.build import build, served_model
from services.attention.step.engine import Engine
from services.config import load_settings
from services.errors import CheckpointError, ConfigError
from services.messages import GenerateRequest
from services.supervisor.gpus import Gpus
from services.supervisor.preflight import preflight

REQUESTS = [
    ask("greedy", [7, 30, 200, 5], max_tokens=30, ignore_eos=True),
    ask("sampled", range(3, 30), max_tokens=30, ignore_eos=True, temperature=0.8, seed=3),
]


def _arguments(model: Path, draft: Path | None, *extra: str) -> list[str]:
    given = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--kv-blocks", "100", *extra]
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    return given if draft is None else [*given, "--speculative-config", json.dumps(config)]


def _engine(model: Path, draft: Path | None, *extra: str) -> Engine[Any]:
    return build(load_settings(_arguments(model, draft, *extra)), lambda: 0, worker="w").engine


def _said(engine: Engine[Any], requests: list[GenerateRequest] = REQUESTS) -> dict[str, list[int]]:
    return {name: tokens(events) for name, events in run(engine, *requests).items()}


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "exaone_moe", "mixtral"])
def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path, family: str) -> None:
    """With its windows, sinks, latents, biases, and what is between the products of its experts."""
    folder = save_checkpoint(tmp_path, family)
    plain, engine = _engine(folder, None), _engine(folder, folder)
    assert _said(engine) == _said(plain)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 20
    assert not stats.drafting_failures


def test_a_model_with_recurrent_layers_cannot_draft(tmp_path: Path) -> None:
    served = save_checkpoint(tmp_path / "served", "qwen3_moe")
    settings = load_settings(_arguments(served, save_checkpoint(tmp_path / "draft", "qwen3_next")))
    for starts in (lambda: served_model(settings), lambda: preflight(settings, lambda: Gpus())):
        with pytest.raises(ConfigError, match=r'draft model .* \("qwen3_next"\) has 1 recurrent layers'):
            starts()


def test_a_quantised_model_drafts_where_the_served_one_treats_each_row_by_itself(tmp_path: Path) -> None:
    served = save_checkpoint(tmp_path / "served", "mixtral")
    draft = quantise(served, tmp_path, FORMATS["ct-int8-channel"])
    plain, engine = (_engine(served, folder, "--batch-invariant") for folder in (None, draft.folder))
    assert _said(engine) == _said(plain)
    stats = engine.stats()
    assert not stats.drafting_failures
    assert stats.accepted_tokens > 0


def test_a_preview_counts_the_weights_that_the_worker_holds(tmp_path: Path) -> None:
    served = save_checkpoint(tmp_path / "served", "mixtral")
    draft = quantise(served, tmp_path, FORMATS["ct-int8-channel"])
    settings = load_settings(_arguments(served, draft.folder))
    held = served_model(settings)
    assert held.draft is not None
    assert held.draft.spec.experts.title == "int8-channel"
    assert preflight(settings, lambda: Gpus()).weight_bytes == held.fitting._weights()


def test_a_draft_model_without_weights_is_found_before_any_process_starts(tmp_path: Path) -> None:
    served = save_checkpoint(tmp_path / "served", "mixtral")
    draft = save_checkpoint(tmp_path / "draft", "mixtral")
    (draft / "model.safetensors").unlink()
    settings = load_settings(_arguments(served, draft))
    for starts in (lambda: served_model(settings), lambda: preflight(settings, lambda: Gpus())):
        with pytest.raises(CheckpointError, match=f"{draft}"):
            starts()
