"""Room for the rows of one grouped call of several attention workers.

Legend: C rows of the call, D hidden size, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.exchange.layout import Layout


@dataclass(frozen=True, slots=True)
class Joined:
    """Room for the rows of a call, on the seat's device: member m has rows from ``m * bucket`` on.

    ids are -1 where there are no rows.
    """

    x_CD: Tensor
    taken_CK: Tensor
    weights_CK: Tensor

    @staticmethod
    def room(rows: int, layout: Layout, device: torch.device) -> Joined:
        """Allocate room for calls of up to ``rows`` rows of all members."""
        return Joined(
            x_CD=torch.zeros(rows, layout.hidden, dtype=layout.dtype, device=device),
            taken_CK=torch.full((rows, layout.slots), -1, dtype=torch.int32, device=device),
            weights_CK=torch.zeros(rows, layout.slots, dtype=torch.float32, device=device),
        )

    def of(self, rows: int) -> Joined:
        """Return the first ``rows`` rows of the room, as views."""
        return Joined(self.x_CD[:rows], self.taken_CK[:rows], self.weights_CK[:rows])
