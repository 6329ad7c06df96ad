"""Histories of rows whose tokens are given: laid into blocks as the KV cache has them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from services.attention.sampling.histories import History
from services.attention.sequences.sequence import DrawRow


def history_of(rows: Sequence[DrawRow], device: torch.device | None = None, block_size: int = 4) -> History:
    """Of those of ``rows`` that look back, in blocks all over the place, with other tokens in between."""
    tokens = [row.token_ids for row in rows if row.looks_back]
    width = max((-(-len(each) // block_size) for each in tokens), default=0) + 1
    blocks = random.Random(len(tokens)).sample(range(2 * width * len(tokens)), width * len(tokens))
    blocks_EM = np.array(blocks, dtype=np.int64).reshape(len(tokens), width)
    token_ids_S = np.ones((2 * width * len(tokens), block_size), dtype=np.int64)
    for each, blocks_M in zip(tokens, blocks_EM, strict=True):
        padded = [*each, *[0] * (width * block_size - len(each))]
        token_ids_S[blocks_M] = np.array(padded).reshape(width, block_size)
    return History(
        torch.from_numpy(token_ids_S).flatten().to(device), block_size, torch.from_numpy(blocks_EM).to(device)
    )
