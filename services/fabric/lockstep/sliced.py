"""Expert slicing: each expert's inner width is split over the ranks of a group, whose partial outputs are summed.

As in DeepSpeed Inference (sections V-A and V-B), exchanges with other groups stay among ranks of equal slice: p ranks
in slices of L make O(p / L) messages, and O(L) more inside the group. The ranks of a group have rows of their own here,
so that the link gathers the rows first, and splits the sums again.
Legend: T rows, D hidden size, K slots per row, L slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from services.fabric.link import ExpertLink
from services.fabric.lockstep.flat import STAGES, Tags
from services.fabric.lockstep.gloo import Exchange, Wire
from services.fabric.lockstep.rows import Batch, joined, received, room_for
from services.fabric.row_counts import CountedLink, ExpertRows

HandleT = TypeVar("HandleT")
GATHER, SUM = STAGES - 2, STAGES - 1
"""Tags that the inner link does not use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedHandle(Generic[HandleT]):
    """A dispatch in flight, with the number of ``rows`` of each rank of the group."""

    inner: HandleT
    rows: tuple[int, ...]
    sums: Exchange


class SlicedLink(CountedLink, Generic[HandleT]):
    """A link whose experts are split over ``group``.

    Args:
        inner: link among the ranks with this rank's slice; takes the rows of the whole group.
        group: the ranks that hold the slices, in the order of the slices.
        max_rows: largest number of rows of one dispatch, of any rank.
    """

    def __init__(
        self, inner: ExpertLink[HandleT], wire: Wire, *, group: Sequence[int], max_rows: int, rows: ExpertRows
    ) -> None:
        super().__init__(rows)
        self._inner, self._wire, self._group = inner, wire, sorted(group)
        self._peers = [rank for rank in self._group if rank != wire.rank]
        self._max_rows, self._tags = max_rows, Tags()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> SlicedHandle[HandleT]:
        """Wait for the rows of the group and dispatch them. Raises LockstepBroken."""
        self._rows.count(layer, expert_ids_TK)
        tag = self._tags.next()
        own = Batch(x_ND=x_TD, places_NK=expert_ids_TK, weights_NK=weights_TK)
        gather = self._wire.open(tag + GATHER, dict.fromkeys(self._peers, room_for(self._max_rows, own)))
        gather.send(dict.fromkeys(self._peers, (expert_ids_TK.int(), weights_TK.float(), x_TD)))
        come = {rank: received({rank: message}, own)[0] for rank, message in gather.wait().items()}
        parts = [own if rank == self._wire.rank else come[rank] for rank in self._group]
        every = joined(parts, own)
        return SlicedHandle(
            inner=self._inner.dispatch(layer, every.x_ND, every.places_NK, every.weights_NK),
            rows=tuple(map(len, parts)),
            sums=self._wire.open(tag + SUM, dict.fromkeys(self._peers, x_TD.nbytes), exact=True),
        )

    def combine(self, handle: SlicedHandle[HandleT]) -> Tensor:
        """Return the sum over the slices: in float32, in their order, rounded once. Raises LockstepBroken."""
        y_ND = self._inner.combine(handle.inner)
        parts = dict(zip(self._group, y_ND.split_with_sizes(list(handle.rows)), strict=True))
        handle.sums.send({rank: (parts[rank],) for rank in self._peers})
        come = handle.sums.wait()
        own_TD = parts[self._wire.rank]
        total_TD = torch.zeros(own_TD.shape, dtype=torch.float32, device=own_TD.device)
        for rank in self._group:
            if rank == self._wire.rank:
                total_TD += own_TD
            elif rank in come:  # without rows there is no message
                total_TD += come[rank].view(own_TD.dtype).view(own_TD.shape)
        return total_TD.to(own_TD.dtype)
