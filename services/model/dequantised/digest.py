"""Digests of weights as a quantised checkpoint stands for them, rounded to its dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from services.model.checkpoint import Checkpoint


def digest_of_loaded(checkpoint: Checkpoint, dtype: str, names: Sequence[str]) -> bytes:
    """Return the SHA-256 of weights one below the other. Raises CheckpointError."""
    found, loaded = hashlib.sha256(), getattr(torch, dtype)
    for name in names:
        for piece in checkpoint.pieces(name):
            found.update(piece.to(loaded).view(torch.uint8).numpy().data)
    return found.digest()


@contextmanager
def single_threads() -> Iterator[None]:
    """Let threads that are made inside compute by themselves, not with as many others each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
