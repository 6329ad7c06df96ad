"""Finds and loads the model that drafts, if there is one: all of it is in this process, its experts, too."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from services.attention.draft_model.drafter import ModelDrafter
from services.attention.step.cuda_graphs import Capture
from services.attention.step.engine import EngineOptions
from services.config import Settings
from services.fabric.local import LocalLink
from services.model.dense import DenseModel
from services.model.draft_spec import check_context, draft_spec
from services.model.experts import ExpertShard
from services.model.products import FastestProducts
from services.model.progress import Progress
from services.model.spec import ModelSpec
from services.model.weight_source import WeightSource
from services.model.weights import load_dense, load_experts
from services.model.weights_sample import with_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The draft model before its weights are read."""

    folder: Path
    spec: ModelSpec

    @classmethod
    def of(cls, settings: Settings, served: ModelSpec) -> Draft | None:
        """Return the draft model that ``settings`` name; None if they name none.

        Raises:
            ConfigError: it cannot draft for ``served``.
            CheckpointError: it is damaged or not supported.
        """
        config = settings.speculation
        if config is None or (folder := config.folder) is None:
            return None
        assert settings.model is not None, "load_settings requires it of this role"
        spec = draft_spec(folder, served, settings.model)
        if settings.max_model_len is not None:
            check_context(spec, folder, settings.max_model_len)
        return cls(folder=folder, spec=with_weights(spec, folder, "auto"))

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        source: WeightSource,
    ) -> LoadedDraft:
        """Read its weights. Raises CheckpointError.

        Its rows are multiplied as is fastest, with ``--batch-invariant`` too: no answer depends on the bits of a draft,
        and its experts may be quantised."""
        spec, products = self.spec, FastestProducts()
        dense = load_dense(self.folder, spec, dtype=dtype, device=device, progress=progress, source=source)
        link = LocalLink({}, num_experts=0)
        if spec.moe_layers:
            experts = load_experts(self.folder, spec, dtype=dtype, device=device, progress=progress, source=source)
            shard = ExpertShard(
                experts, num_experts=spec.num_experts, products=products, activation=spec.expert_activation
            )
            link = LocalLink(shard.by_layer(), num_experts=spec.num_experts)
        log.info("drafts are made by %s in %s", spec.family, self.folder)
        return LoadedDraft(draft=self, model=DenseModel(spec, dense, products), link=link)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDraft:
    """The draft model on the device."""

    draft: Draft
    model: DenseModel
    link: LocalLink

    def drafter(self, options: EngineOptions, capture: Capture | None) -> ModelDrafter:
        """Return what drafts for an engine with ``options``. Raises ConfigError: its context is too short."""
        assert options.max_model_len is not None
        check_context(self.draft.spec, self.draft.folder, options.max_model_len)
        return ModelDrafter(self.model, self.link, options, capture)
