"""torch's error for a full GPU in, the error that a script shows to its user out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pocket_moe.errors import PocketError


@contextmanager
def told_when_full(hint: str, work: str = "this") -> Iterator[None]:
    """What runs inside may fill the GPU.

    Raises:
        PocketError: it did; says that there is too little memory for ``work``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PocketError(f"The GPU has too little memory for {work}.", hint=hint) from error
