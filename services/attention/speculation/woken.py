"""Counts which experts drafts wake: those of a layer that no other row of the step needs, in a sample of steps.

In: plans with drafts, and the experts that each row of a layer chose, where the link calls experts in this process by
the host. Out: two totals, whose ratio is the part of experts that the rows of drafts alone had computed.
Legend: T rows of the step, K experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.attention.sequences.plan import StepPlan

EVERY = 16
"""One step in so many with drafts is counted: that waits for the device."""


class Watched(Protocol):
    """A link that shows what it dispatches."""

    on_dispatch: Callable[[int, Tensor], None] | None


class WokenExperts:
    """The counts of one engine. ``every``: one step with drafts in so many is counted."""

    def __init__(self, link: Watched, every: int = EVERY) -> None:
        self._link, self._every, self._steps = link, every, 0
        self._drafts_T: NDArray[np.bool_] | None = None
        self._chosen: dict[int, Tensor] = {}
        self.hit = self.by_drafts = 0
        """Experts that the steps had computed, over all layers, and those that only drafts had chosen."""

    def watch(self, plan: StepPlan) -> None:
        """Look at the step of ``plan``, which follows, if it has drafts and it is its turn; at no other any more."""
        self._link.on_dispatch = self._drafts_T = None
        self._steps += bool(plan.chains)
        if not plan.chains or (self._steps - 1) % self._every:
            return
        drafts = [False] * len(plan.decodes)
        for piece in plan.pieces:
            drafts += [False] * (piece.length - len(piece.drafts)) + [True] * len(piece.drafts)
        self._drafts_T, self._chosen = np.array(drafts), {}
        self._link.on_dispatch = self._dispatched

    def count(self) -> None:
        """Count what the step chose, which has been read. Steps by CUDA graphs show nothing."""
        if (drafts_T := self._drafts_T) is None:
            return
        self._link.on_dispatch = self._drafts_T = None
        for expert_ids_TK in self._chosen.values():
            if len(expert_ids_TK) == len(drafts_T):  # it ran as a whole
                ids_TK = expert_ids_TK.cpu().numpy()
                others = np.unique(ids_TK[~drafts_T])
                woken = np.setdiff1d(ids_TK[drafts_T], others)
                self.by_drafts += int((woken >= 0).sum())
                self.hit += int((others >= 0).sum()) + int((woken >= 0).sum())
        self._chosen = {}

    def _dispatched(self, layer: int, expert_ids_TK: Tensor) -> None:
        self._chosen[layer] = expert_ids_TK
