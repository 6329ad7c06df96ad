"""A model folder and held-out documents in, how often two engines' greedy choices are the same out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pocket_moe.errors import PocketError, needed
from pocket_moe.measure.inputs import open_shards
from pocket_moe.measure.traffic import choose_documents
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.speculators.boost_rows import best_tokens

Choices = list[list[int]]
"""By document: the greedy token after each of its tokens but the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementSettings:
    """``length``: positions of a document; the last one is for the token that vLLM must write."""

    model: Path
    work: Path
    tokens: int
    length: int


def agreement(settings: AgreementSettings) -> dict[str, Any]:
    """For ``vllm.json``: vLLM in bf16 against the oracle in fp32 and against our own model in bf16.

    Raises:
        PocketError: vLLM or a GPU is missing.
    """
    weights, documents = {"model": fingerprint(settings.model)}, heldout_documents(settings)
    theirs, version = vllm_choices(settings, documents)
    return {
        "weights": weights,
        "version": version,
        "tokens": sum(map(len, theirs)),
        "agree_fp32": share(theirs, oracle_choices(settings.model, documents)),
        "agree_bf16": share(theirs, our_choices(settings.model, documents)),
    }


def heldout_documents(settings: AgreementSettings) -> Choices:
    """Token ids of documents of two tokens or more, cut to ``length - 1``."""
    shards = open_shards(settings.work, "heldout", settings.model)
    lengths = np.minimum(np.diff(shards.starts), settings.length - 1)
    chosen = choose_documents(lengths, shards.domain, domains=len(shards.meta.domains), tokens=settings.tokens)
    texts = [shards.tokens[shards.starts[d] :][: lengths[d]].tolist() for d in chosen]
    return [text for text in texts if len(text) > 1]


def share(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Of positions where both choose the same. Example: ``share([[1, 2], [3]], [[1, 5], [3]]) == 2 / 3``."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return round(sum(a == b for a, b in pairs) / max(1, len(pairs)), 5)


def oracle_choices(folder: Path, documents: Choices) -> Choices:
    """Of ``services/model/reference.py`` in float32, on the CPU."""
    from services.model.reference import ReferenceModel  # its dependencies are needed for this measurement only

    oracle = ReferenceModel.load(folder)
    return [oracle.logits(text)[:-1].argmax(1).tolist() for text in documents]


def our_choices(folder: Path, documents: Choices) -> Choices:
    """Of our own model in bfloat16, with the kernels that the server uses where there is a GPU."""
    model = export.load(folder, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
    device = model.embedding.device
    rows = [torch.tensor([text], device=device) for text in documents]
    starts = [torch.arange(row.shape[1], device=device).unsqueeze(0) for row in rows]
    found = [best_tokens(model, row, start, 1)[0, :-1, 0] for row, start in zip(rows, starts, strict=True)]
    return [choices.tolist() for choices in found]


def vllm_choices(settings: AgreementSettings, documents: Choices) -> tuple[Choices, str]:
    """Of vLLM in bfloat16, from the log probabilities of the prompt; and vLLM's version."""
    vllm = _vllm()
    engine = vllm.LLM(
        model=str(settings.model),
        dtype="bfloat16",
        max_model_len=settings.length,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enforce_eager=True,  # no compilation: there is one pass
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": text} for text in documents]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    # The first token has no prediction; each other one has the best token's log probability beside its own.
    choices = [[_best(position) for position in output.prompt_logprobs[1:]] for output in outputs]
    return choices, str(vllm.__version__)


def _best(logprobs: dict[int, Any]) -> int:
    return next(token for token, entry in logprobs.items() if entry.rank == 1)


def _vllm() -> Any:
    if not torch.cuda.is_available():
        raise PocketError("This machine has no CUDA device.", hint="Run this where vLLM can run.")
    return needed("vllm", "Put the folder it is installed in on PYTHONPATH.")
