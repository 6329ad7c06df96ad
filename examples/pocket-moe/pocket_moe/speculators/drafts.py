"""What speculators propose and what the target says in, how often they are right out: alone, and together as a tree.

At one position of a text, everyone reads the same tokens before it (teacher forcing). The target's token is its most
likely one; a tree of k branches holds k tokens there, and is right if the target's is among them. Three ways to grow k:

- ``one_each``: the most likely token of each of the first k speculators (fewer where they agree): the pool as
  ExpertFlow and SpecInfer draw it, one sequence per speculator;
- ``merged``: k different tokens of the whole pool, taken in turn: everyone's first choice, then everyone's second, ...;
- ``first_alone``: the k most likely tokens of the first speculator, to show what the others add.

Legend: S speculators, N positions, C candidates of a speculator, M = S x C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

BRANCHES: Final = (1, 2, 4)


def merged_rank(candidates_SNC: Tensor, labels_N: Tensor) -> Tensor:
    """int64 ``[N]``: how many different tokens the merged pool names before the label; M where it never does.

    Example: speculators with (5, 6) and (5, 7), label 7: the pool says 5, 6, 7, so the rank is 2.
    """
    order_NM = candidates_SNC.permute(1, 2, 0).flatten(1)
    same_NMM = order_NM.unsqueeze(2) == order_NM.unsqueeze(1)
    new_NM = ~same_NMM.tril(-1).any(2)
    hit_NM = order_NM == labels_N.unsqueeze(1)
    before_NM = new_NM.cumsum(1) - new_NM.long()
    rank_NM = torch.where(hit_NM, before_NM, order_NM.shape[1])
    return rank_NM.amin(1)


def hits(candidates_SNC: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    """bool ``[N]`` by measure: ``alone/i``, ``one_each/k``, ``merged/k`` and ``first_alone/k``."""
    assert candidates_SNC.shape[2] >= max(BRANCHES), "every speculator names as many tokens as the widest tree has"
    right_SNC = candidates_SNC == labels_N.view(1, -1, 1)
    first_SN = right_SNC[:, :, 0]
    rank_N = merged_rank(candidates_SNC, labels_N)
    found = {f"alone/{index}": first_SN[index] for index in range(len(first_SN))}
    found |= {f"one_each/{count}": first_SN[:count].any(0) for count in range(1, len(first_SN) + 1)}
    found |= {f"merged/{count}": rank_N < count for count in BRANCHES}
    return found | {f"first_alone/{count}": right_SNC[0, :, :count].any(1) for count in BRANCHES}


@dataclass(kw_only=True, slots=True)
class Tally:
    """Positions, and how many of them each measure got right, by domain; or how many tokens from there on."""

    positions: dict[str, int] = field(default_factory=dict)
    right: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, domain: str, found: Mapping[str, Tensor]) -> None:
        counts = {name: (len(hit_N), int(hit_N.sum())) for name, hit_N in found.items()}
        self.positions[domain] = self.positions.get(domain, 0) + next(iter(counts.values()))[0]
        for name, (_, right) in counts.items():
            by_domain = self.right.setdefault(name, {})
            by_domain[domain] = by_domain.get(domain, 0) + right

    def record(self) -> dict[str, Any]:
        """Shares of positions, or tokens per position, by measure and domain; "all" over all positions."""
        total = sum(self.positions.values())
        shares = {
            name: {domain: _share(right, self.positions[domain]) for domain, right in by_domain.items()}
            | {"all": _share(sum(by_domain.values()), total)}
            for name, by_domain in self.right.items()
        }
        return {"positions": self.positions | {"all": total}, "accepted": shares}


def _share(right: int, positions: int) -> float:
    return round(right / max(1, positions), 5)
