"""What every measurement needs: shards that were made with the model's tokenizer, and documents of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pocket_moe.corpus.shards import Shards, tokenizer_sha256
from pocket_moe.errors import PocketError


def open_shards(work: Path, split: str, *folders: Path) -> Shards:
    """A split for the models in ``folders``.

    Raises:
        PocketError: it is missing, or a model has another tokenizer: its perplexity would mean nothing.
    """
    shards = Shards(work / "shards", split)
    for folder in folders:
        try:
            found = tokenizer_sha256(folder / "tokenizer.json")
        except (OSError, ValueError) as error:
            raise PocketError(f"There is no model in {folder}: {error}", hint="Export it with train.py.") from error
        if found != shards.meta.tokenizer_sha256:
            raise PocketError(
                f"The model in {folder} has another tokenizer than the shards in {work / 'shards'}.",
                hint="Train on these shards, or pass the folder with the model's own shards as --work.",
            )
    return shards


def drawn_documents(shards: Shards, tokens: int | None, seed: int) -> NDArray[np.int64]:
    """Documents in a drawn order, up to ``tokens`` tokens or all.

    Shards may hold domains apart, so a part of them is drawn, not cut off.
    """
    order = np.random.default_rng(seed).permutation(len(shards.domain))
    if tokens is None:
        return order
    return order[: int(np.searchsorted(np.cumsum(np.diff(shards.starts)[order]), tokens)) + 1]
