"""Recurrent states of sequences, beside the pages of the KV cache: one slot holds what all recurrent layers keep of one
sequence after some token. ``services/attention/batching/state_slots.py`` hands slots out.

Legend: S slots, P tokens that a convolution looks back to, C its channels, H value heads, K and V dimensions of a
head's key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.errors import OutOfMemory
from services.model.spec import ModelSpec
from services.model.state_room import FIRST_SLOT


class StateCache:
    """``slots`` slots behind the two that are no sequence's, in float32 whatever the serving dtype is: each token adds
    its rounding to a state. They are there from :meth:`allocate` to :meth:`free`."""

    def __init__(self, spec: ModelSpec, *, slots: int, device: torch.device) -> None:
        recurrent = spec.recurrent
        assert recurrent is not None, "the spec has recurrent layers"
        self.slots = slots
        count = slots + FIRST_SLOT
        self._shapes = (
            (count, recurrent.conv - 1, recurrent.channels),
            (count, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim),
        )
        self._layers, self._device, self._nbytes = spec.recurrent_layers, device, count * spec.state_bytes
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def allocate(self) -> None:
        """Take the memory, zeroed. Raises OutOfMemory."""
        try:
            self._states = {layer: self._zeros() for layer in self._layers}
        except RuntimeError as error:
            raise OutOfMemory(
                f"{self.slots} recurrent states take {self._nbytes / 2**30:.3g} GiB, more than the memory of "
                f"{self._device} has left.",
                hint="Lower --max-num-seqs.",
            ) from error

    def _zeros(self) -> tuple[Tensor, Tensor]:
        conv, matrix = (torch.zeros(shape, device=self._device) for shape in self._shapes)
        return conv, matrix

    def free(self) -> None:
        """Give the memory back, with all that it holds, until :meth:`allocate`."""
        self._states = {}

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(conv_SPC, matrix_SHKV)`` of one layer."""
        return self._states[layer]
