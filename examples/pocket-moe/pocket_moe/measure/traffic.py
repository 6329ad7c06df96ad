"""A model and held-out documents in, which experts their tokens chose out; and how evenly that loads the experts.

Legend: N tokens, L layers, K experts of a token, D domains, E experts, B rows, P positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.model.model import PocketMoe
from pocket_moe.records import ExpertTrace

Ints = NDArray[np.int64]


def choose_documents(lengths: Ints, domain: NDArray[np.uint8], *, domains: int, tokens: int) -> Ints:
    """Documents, in their order, that give every domain an equal share of ``tokens``.

    A domain with less than its share gives all it has, and the others share the rest. The last document of a domain
    may exceed the share.

    Example: lengths 5, 5, 5, 2 of domains 0, 0, 0, 1 and 12 tokens: domain 1 gives 2, domain 0 up to 10: 0, 1, 3.
    """
    held = np.bincount(domain, weights=lengths, minlength=domains).astype(np.int64)
    quota = _shares(held, tokens)
    before = np.zeros(len(lengths), np.int64)
    for index in range(domains):
        of_domain = domain == index
        before[of_domain] = np.cumsum(lengths[of_domain]) - lengths[of_domain]
    return np.flatnonzero(before < quota[domain])


def trace(model: PocketMoe, shards: Shards, *, tokens: int, length: int, rows: int) -> ExpertTrace:
    """The first ``length`` tokens of each chosen document, ``rows`` documents at a time, each in its own context."""
    if not model.config.sparse:
        raise PocketError("This model has no experts to trace.", hint="Pass the Mixture-of-Experts with --model.")
    lengths = np.minimum(np.diff(shards.starts), length)
    chosen = choose_documents(lengths, shards.domain, domains=len(shards.meta.domains), tokens=tokens)
    parts = [_choices(model, shards, chosen[first : first + rows], length) for first in range(0, len(chosen), rows)]
    return ExpertTrace(
        ids=np.concatenate(parts),
        starts=np.concatenate([[0], np.cumsum(lengths[chosen])]),
        document_domain=shards.domain[chosen],
        domains=tuple(shards.meta.domains),
        experts=model.config.num_experts,
    )


def load_record(traced: ExpertTrace) -> dict[str, Any]:
    """For ``load.json``: tokens and counts by domain, layer and expert, and max over mean load by domain and layer."""
    counts_DLE = traced.counts()
    tokens_D = np.bincount(traced.domain, minlength=len(traced.domains))
    peak_DL, all_L = peak(counts_DLE), peak(counts_DLE.sum(0))
    return {
        "domains": list(traced.domains),
        "slots": traced.ids.shape[2],
        "tokens": dict(zip(traced.domains, tokens_D.tolist(), strict=True)),
        "counts": dict(zip(traced.domains, counts_DLE.tolist(), strict=True)),
        "peak": dict(zip(traced.domains, np.round(peak_DL, 4).tolist(), strict=True)),
        "peak_of_all": np.round(all_L, 4).tolist(),
    }


def peak(counts_E: Ints) -> NDArray[np.float64]:
    """Max over mean load along the last axis: 1 if experts share evenly, E if one does everything, 0 without tokens."""
    mean = np.asarray(counts_E.mean(-1), np.float64)
    share = np.asarray(counts_E.max(-1) / np.maximum(mean, 1e-9), np.float64)
    return np.where(mean > 0, share, 0.0)


def _shares(held: Ints, tokens: int) -> Ints:
    """Equal shares, and what the poor lack goes to the others."""
    quota = np.zeros_like(held)
    left = tokens
    for rank, index in enumerate(np.argsort(held, kind="stable").tolist()):
        quota[index] = min(int(held[index]), left // (len(held) - rank))
        left -= int(quota[index])
    return quota


@torch.no_grad()
def _choices(model: PocketMoe, shards: Shards, documents: Sequence[int] | Ints, length: int) -> NDArray[np.uint8]:
    """``[N, L, K]`` of these documents; rows are padded on the right, where causal attention does not look."""
    texts = [np.asarray(shards.tokens[shards.starts[d] : shards.starts[d + 1]][:length], np.int64) for d in documents]
    width = max(len(text) for text in texts)
    tokens_BP = torch.full((len(texts), width), model.config.pad_token_id)
    for row, text in zip(tokens_BP, texts, strict=True):
        row[: len(text)] = torch.from_numpy(text)
    real_BP = torch.arange(width) < torch.tensor([len(text) for text in texts]).unsqueeze(1)
    seen: list[Tensor] = []
    device = model.embedding.device
    model.hidden(tokens_BP.to(device), observer=lambda _layer, ids_TK, _weights: seen.append(ids_TK.to(torch.uint8)))
    ids_NLK = torch.stack(seen, dim=1).cpu()[real_BP.flatten()]
    return np.sort(ids_NLK.numpy(), axis=2)
