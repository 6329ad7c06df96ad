"""A fixed part of the held-out split in, nats per token by domain out.

Legend: B rows, L positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pocket_moe.corpus.packing import cut, pack
from pocket_moe.corpus.shards import Shards
from pocket_moe.model.losses import NO_TARGET, next_tokens
from pocket_moe.model.model import PocketMoe


@dataclass(frozen=True, kw_only=True, slots=True)
class _Domain:
    tokens_BL: Tensor
    positions_BL: Tensor
    targets_BL: Tensor


class Heldout:
    """The first documents of each domain, up to ``tokens_per_domain`` tokens; domains without any are left out."""

    def __init__(
        self, shards: Shards, device: torch.device, *, tokens_per_domain: int, length: int, pad_id: int, rows: int
    ) -> None:
        self._rows = rows
        self._domains: dict[str, _Domain] = {}
        for index, name in enumerate(shards.meta.domains):
            packed = _first_documents(shards, index, tokens_per_domain, length, pad_id)
            if packed is not None:
                tokens_BL, positions_BL = (x.to(device) for x in packed)
                targets_BL = next_tokens(tokens_BL, positions_BL, pad_id=pad_id)
                self._domains[name] = _Domain(tokens_BL=tokens_BL, positions_BL=positions_BL, targets_BL=targets_BL)
        self.tokens = {name: int((d.targets_BL != NO_TARGET).sum()) for name, d in self._domains.items()}
        """How many tokens are predicted, by domain."""

    def evaluate(self, model: PocketMoe) -> dict[str, float]:
        """Nats per token by domain; ``model`` should be in evaluation mode. Waits for the device once."""
        sums = [self._sum(model, domain) for domain in self._domains.values()]
        totals = torch.stack(sums).tolist() if sums else []
        return {name: total / max(1, self.tokens[name]) for name, total in zip(self._domains, totals, strict=True)}

    def mean(self, by_domain: dict[str, float]) -> float:
        """Over all tokens."""
        return sum(by_domain[name] * self.tokens[name] for name in by_domain) / max(1, sum(self.tokens.values()))

    def _sum(self, model: PocketMoe, domain: _Domain) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=domain.tokens_BL.device)
        for first in range(0, len(domain.tokens_BL), self._rows):
            rows = slice(first, first + self._rows)
            losses_BL = model.token_losses(
                domain.tokens_BL[rows], domain.positions_BL[rows], targets_BL=domain.targets_BL[rows]
            )
            total += losses_BL.sum(dtype=torch.float64)
        return total


def _first_documents(
    shards: Shards, domain: int, most_tokens: int, length: int, pad_id: int
) -> tuple[Tensor, Tensor] | None:
    documents = np.flatnonzero(shards.domain == domain)
    sizes = np.diff(shards.starts)[documents]
    kept = documents[: int(np.searchsorted(np.cumsum(sizes), most_tokens)) + 1]
    if not len(kept):
        return None
    pieces = cut(shards.starts[kept], np.diff(shards.starts)[kept], length, None)
    packed = pack(shards.tokens, pieces, length, pad_id=pad_id)
    return torch.from_numpy(packed.tokens).long(), torch.from_numpy(packed.positions).long()
