"""A model folder and recorded answers in, how far transformers' float32 logits are from the oracle's out.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pocket_moe.errors import needed
from pocket_moe.records import Greedy
from services.model.reference import ReferenceModel


def compare(folder: Path, answers: Sequence[Greedy]) -> dict[str, Any]:
    """For ``logits.json``: the largest difference of a logit over all positions of the answers with their prompts, the
    largest logit itself, and how many answers stay within 1e-5.

    Raises:
        PocketError: transformers is missing.
    """
    transformers = needed("transformers", "Install it (pip install -e '.[dev]'), or name --only.")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle = ReferenceModel.load(folder)
    pairs = [(_logits(theirs, ids), oracle.logits(ids)) for ids in _texts(answers)]
    differences = [float((a_TV - b_TV).abs().max()) for a_TV, b_TV in pairs]
    return {
        "answers": len(pairs),
        "largest_difference": float(f"{max(differences):.4g}"),
        "largest_logit": float(f"{max(float(b_TV.abs().max()) for _, b_TV in pairs):.4g}"),
        "within_1e-5": sum(difference <= 1e-5 for difference in differences),
    }


def _texts(answers: Sequence[Greedy]) -> list[list[int]]:
    return [[*answer.prompt_ids, *answer.output_ids] for answer in answers]


@torch.no_grad()
def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    logits_TV: Tensor = model(torch.tensor([ids])).logits[0]
    return logits_TV
