"""The pocket model's speculators, loaded as a worker loads them."""

from __future__ import annotations

import torch

from services.attention.setup.drafts import Draft, LoadedDraft
from services.config.speculation import SpeculativeConfig
from services.model.load_spec import load_spec
from services.model.progress import NoProgress
from services.model.weight_source import FromCheckpoint
from testkit.pocket.answers import POCKET


def pocket_draft(number: int, device: torch.device, dtype: torch.dtype) -> LoadedDraft:
    folder = POCKET / "speculators" / str(number)
    draft = Draft(folder=folder, spec=load_spec(folder, drafts=True))
    return draft.load(dtype=dtype, device=device, progress=NoProgress(), source=FromCheckpoint())


def pocket_config(number: int, drafts: int, branches: int = 1) -> SpeculativeConfig:
    folder = str(POCKET / "speculators" / str(number))
    return SpeculativeConfig(method="draft_model", model=folder, num_speculative_tokens=drafts, num_branches=branches)
