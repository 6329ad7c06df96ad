"""Lengths of documents in, where their pieces go in rows of equal length out: best fit, longest first.

Pure numpy and integers. A document longer than a row is cut; no other is, so every token is seen in its context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Runs of tokens: where each begins in the shard and how long it is."""

    first: Ints
    length: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Packed tokens. ``positions`` count from 0 in each piece, and in the padding that ends a row."""

    tokens: NDArray[np.int16]
    positions: NDArray[np.int16]


def cut(first: Ints, length: Ints, row: int, rng: np.random.Generator | None) -> Pieces:
    """Pieces of at most ``row`` tokens; with ``rng`` the first cut of a long document falls anywhere.

    Example: a document of 1100 tokens at 0, rows of 512, no rng: pieces at 0, 512, 1024 of 512, 512, 76 tokens.
    """
    head = np.minimum(length, row)
    if rng is not None:
        head = np.where(length > row, rng.integers(1, row + 1, len(length)), head)
    count = 1 + -(-(length - head) // row)
    document = np.repeat(np.arange(len(length)), count)
    index = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.where(index == 0, 0, head[document] + (index - 1) * row)
    size = np.where(index == 0, head[document], np.minimum(row, length[document] - begin))
    return Pieces(first=first[document] + begin, length=size)


def place(length: Ints, row: int) -> tuple[Ints, Ints, int]:
    """Row and offset of each piece, and how many rows there are: a piece goes where it leaves the least room.

    ``room`` has bit r set if some row has r places left, so the fullest row that fits is a shift and a lowest bit.
    """
    rows, offsets = np.zeros_like(length), np.zeros_like(length)
    open_rows: list[list[int]] = [[] for _ in range(row + 1)]
    room = used = 0
    for piece in np.argsort(-length, kind="stable").tolist():
        size = int(length[piece])
        fitting = room >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            target = open_rows[left].pop()
            room &= ~(0 if open_rows[left] else 1 << left)
        else:
            left, target, used = row, used, used + 1
        rows[piece], offsets[piece] = target, row - left
        if left > size:
            open_rows[left - size].append(target)
            room |= 1 << (left - size)
    return rows, offsets, used


def pack(tokens: NDArray[np.uint16], pieces: Pieces, row: int, *, pad_id: int) -> Rows:
    """Rows filled with the pieces, and with ``pad_id`` behind them."""
    rows, offsets, count = place(pieces.length, row)
    ends = np.zeros(count, np.int64)
    np.maximum.at(ends, rows, offsets + pieces.length)
    packed = np.full(count * row, pad_id, np.int16)
    positions = (np.arange(row) - ends[:, None]).astype(np.int16).ravel()
    within = np.arange(pieces.length.sum()) - np.repeat(np.cumsum(pieces.length) - pieces.length, pieces.length)
    target = np.repeat(rows * row + offsets, pieces.length) + within
    packed[target] = tokens[np.repeat(pieces.first, pieces.length) + within].astype(np.int16)
    positions[target] = within
    return Rows(tokens=packed.reshape(count, row), positions=positions.reshape(count, row))
