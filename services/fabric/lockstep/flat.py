"""ExpertLink among ranks in lock-step that each hold some experts: every row goes straight to the ranks that it needs.

All ranks dispatch and combine the same layers in the same order, with any number of rows, 0 too. A rank sends one
message to every other rank and gets one back: O(p) messages a layer for p ranks.
:mod:`services.fabric.lockstep.hierarchical` needs fewer between nodes.
Legend: T rows, D hidden size, K slots per row, P pairs of a row and a slot, S = T x K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from services.fabric.lockstep.gloo import Exchange, Wire
from services.fabric.lockstep.routes import LockstepExperts
from services.fabric.lockstep.rows import Batch, answers, forward_rows, joined, pairs, received, room_for
from services.fabric.row_counts import CountedLink, ExpertRows
from services.fabric.tcp.split import slot_sum

STAGES = 16
"""Number of tags of one dispatch."""
DISPATCHES = 4096
"""Number of dispatches after which tags are used again: far more than are ever in flight."""


class Tags:
    """Counts dispatches, which go in lock-step, so that tags are the same in every rank."""

    def __init__(self) -> None:
        self._dispatches = count()

    def next(self) -> int:
        """Return the first of ``STAGES`` tags for one dispatch."""
        return next(self._dispatches) % DISPATCHES * STAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatHandle:
    """A dispatch in flight; ``ranks_TK`` has the rank of each slot, ``back`` brings the outputs."""

    layer: int
    batch: Batch
    ranks_TK: Tensor
    out: Exchange
    back: Exchange


class FlatLink(CountedLink):
    """Sums outputs in slot order: in float32 the sums equal those of :class:`services.fabric.local.LocalLink`.

    Args:
        peers: the other ranks.
        max_rows: largest number of rows of one dispatch, of any rank.
    """

    def __init__(
        self, wire: Wire, experts: LockstepExperts, *, peers: Sequence[int], max_rows: int, rows: ExpertRows
    ) -> None:
        super().__init__(rows)
        self._wire, self._experts, self._peers = wire, experts, sorted(peers)
        self._max_rows, self._tags = max_rows, Tags()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> FlatHandle:
        """Send rows to their ranks. Raises LockstepBroken."""
        assert len(x_TD) <= self._max_rows, "the other ranks have no room for so many rows"
        self._rows.count(layer, expert_ids_TK)
        tag = self._tags.next()
        places_TK = self._experts.routes.places(layer, expert_ids_TK)
        batch = Batch(x_ND=x_TD, places_NK=places_TK, weights_NK=weights_TK)
        ranks_TK = self._experts.routes.ranks(layer, places_TK)
        out = self._wire.open(tag, dict.fromkeys(self._peers, room_for(self._max_rows, batch)))
        _, messages = forward_rows(batch, ranks_TK, self._peers)
        out.send(messages)
        wanted = {peer: int((ranks_TK == peer).sum()) * _row_bytes(x_TD) for peer in self._peers}
        back = self._wire.open(tag + 1, wanted, exact=True)
        return FlatHandle(layer=layer, batch=batch, ranks_TK=ranks_TK, out=out, back=back)

    def combine(self, handle: FlatHandle) -> Tensor:
        """Compute the rows that came, send them back and sum. Raises LockstepBroken."""
        batch, ranks_S = handle.batch, handle.ranks_TK.flatten()
        arrived, origins = received(handle.out.wait(), batch)
        own_PD, come_PD, come_rows = self._outputs(handle, arrived, origins)
        handle.back.send(answers(come_PD, come_rows, batch.x_ND.dtype))
        out_SD = batch.x_ND.new_empty(len(ranks_S), batch.x_ND.shape[1])
        out_SD[ranks_S == self._wire.rank] = own_PD
        for peer, answer in handle.back.wait().items():
            out_SD[ranks_S == peer] = answer.view(out_SD.dtype).view(-1, out_SD.shape[1])
        return slot_sum(out_SD, ranks_S >= 0, batch.weights_NK, batch.x_ND.dtype)

    def _outputs(
        self, handle: FlatHandle, arrived: Batch, origins: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        """Return unweighted outputs of own pairs and of those that came, and (sender, pairs) of these, in one call."""
        own_TK = torch.where(handle.ranks_TK == self._wire.rank, handle.batch.places_NK, -1)
        own = Batch(x_ND=handle.batch.x_ND, places_NK=own_TK, weights_NK=handle.batch.weights_NK)
        every, index_P = pairs(joined([own, arrived], own))
        y_PD = self._experts(handle.layer, every)
        own_pairs = int((index_P < own_TK.numel()).sum())
        per_row = (arrived.places_NK >= 0).sum(1).split_with_sizes([rows for _, rows in origins])
        come = [(peer, int(pairs_M.sum())) for (peer, _), pairs_M in zip(origins, per_row, strict=True)]
        return y_PD[:own_pairs], y_PD[own_pairs:], come


def _row_bytes(x_TD: Tensor) -> int:
    return x_TD.shape[1] * x_TD.element_size()
