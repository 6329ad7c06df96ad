"""Loads linear layers outside of experts that are held quantised, as they are stored, one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_kernels import QuantisedWeight
from services.model.held_linears import Linear
from services.model.host_memory import spare
from services.model.weight_source import Tensors

Held = tuple[Linear, QuantisedWeight]
"""A layer, and what is filled with it: a weight of one expert."""


def load_linears(held: Sequence[Held], dtype: torch.dtype, tensors: Tensors, advance: Callable[[int], None]) -> None:
    """Fill the weights of ``held``, which are served in ``dtype``. ``advance`` is called with the bytes that were read.
    What a CPU keeps beside them leaves the host :func:`services.model.host_memory.spare`.

    Raises:
        CheckpointError: there is something wrong with them, or they cannot be held as they are stored.
    """
    for linear, weight in held:
        first, weight.forms.spare = 0, spare
        for name, rows in zip(linear.names, linear.rows, strict=True):
            _put_rows(weight, first, tensors.read_stored(name, dtype))
            advance(tensors.nbytes([name]))
            first += rows


def _put_rows(weight: QuantisedWeight, first: int, matrix: QuantisedWeight) -> None:
    """Copy ``matrix`` to the rows from ``first`` on, which begins a block of those that share scales."""
    parts = matrix.tensors()
    for name, target in weight.tensors().items():
        begin = first if name == "packed" else first // weight.scale_rows
        target[:, begin : begin + parts[name].shape[1]].copy_(parts[name])
