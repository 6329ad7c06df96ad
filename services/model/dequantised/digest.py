"""Digests of weights as a quantised checkpoint stands for them, rounded to its dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def digest_of_loaded(pieces: Callable[[str], Iterable[Tensor]], dtype: str, names: Sequence[str]) -> bytes:
    """Return the SHA-256 of weights one below the other, of which ``pieces`` yields some rows after the other.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found, loaded = hashlib.sha256(), getattr(torch, dtype)
    for name in names:
        for piece in pieces(name):
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
