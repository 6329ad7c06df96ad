"""Tokens whose repetition sends rows to one shard group rather than to others, by what the model's routers do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from services.model.reference import ReferenceModel
from services.routing import even_groups

TRIED, KEPT, REPEATED = 120, 4, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HotTokens:
    """``shares`` are the parts of each token's rows that go to ``group``."""

    group: int
    tokens: list[int]
    shares: list[float]


def hot_tokens(model: Path, groups: int, tried: int = TRIED) -> HotTokens:
    """The hottest of some tokens, all for one group of a checkpoint whose experts are divided evenly."""
    rows: dict[int, Counter[int]] = {}
    reference = ReferenceModel.load(
        model, lambda layer, expert_TK: rows.setdefault(layer, Counter()).update(expert_TK.flatten().tolist())
    )
    spec = reference.spec
    shares: dict[int, list[float]] = {}
    for token in random.Random(1).sample(range(20, spec.vocab_size), tried):
        rows.clear()
        reference.run([token] * REPEATED)
        found = [
            sum(rows[layer][expert] for layer, experts in group.experts.items() for expert in experts)
            for group in even_groups(sorted(rows), spec.num_experts, groups)
        ]
        shares[token] = [count / sum(found) for count in found]

    def ranked(group: int) -> list[int]:
        return sorted(shares, key=lambda token: -shares[token][group])[:KEPT]

    hottest = max(range(groups), key=lambda group: sum(shares[token][group] for token in ranked(group)))
    tokens = ranked(hottest)
    return HotTokens(group=hottest, tokens=tokens, shares=[round(shares[token][hottest], 2) for token in tokens])
