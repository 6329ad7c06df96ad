"""Options that a family's layers do not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.models.checkpoints import save_checkpoint

from services.attention.setup.build import served_model
from services.attention.setup.supported import check_supported
from services.config import load_settings
from services.errors import ConfigError
from services.model.load_spec import load_spec
from services.supervisor.gpus import Gpus
from services.supervisor.preflight import preflight


def options(folder: Path, branches: int) -> list[str]:
    config = {"method": "ngram", "num_branches": branches}
    return ["--model", str(folder), "--device", "cpu", "--speculative-config", json.dumps(config)]


@pytest.mark.parametrize(
    ("family", "why"), [("deepseek_v3", "multi-head latent attention"), ("gpt_oss", "attention with sinks on a CPU")]
)
def test_drafts_do_not_branch_where_attention_has_no_mask(tmp_path: Path, family: str, why: str) -> None:
    folder = save_checkpoint(tmp_path, family)
    branching = load_settings(options(folder, 2))
    for starts in (lambda: served_model(branching), lambda: preflight(branching, lambda: Gpus())):
        with pytest.raises(ConfigError, match=rf'num_branches .* must be 1 for model_type "{family}": {why}'):
            starts()
    served_model(load_settings(options(folder, 1)))


def test_sinks_have_one_on_a_gpu(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gpt_oss")
    check_supported(load_settings(options(folder, 2)), load_spec(folder), on_cpu=False)
