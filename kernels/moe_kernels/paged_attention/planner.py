"""The work list of a step: which rows meet which positions, in items that take about equally long. The host
makes one for each step, without torch.

In: rows and length of each sequence. Out: int32 words, which the kernels read on the device::

    HEADER words   how many items, how many rows to merge, zeros
    items          sequence, first row, rows, position of the first row, first position, end, slot, 1 if wide; 8 each
    rows to merge  row, first slot, slots from one part to the next, parts; 4 each
    what rows see  where some may branch: 4 for each row (:mod:`moe_kernels.paged_attention.trees`)

First positions are multiples of the tiling's length, and so are ends of parts but for a tile's last. A slot is a row of
the parts' sums. An item with slot -1 sees all that its rows see and writes them out; the others are
parts of what their rows see (flash-decoding), from ``slot`` on. Programs take items from the longest down
(:func:`moe_kernels.paged_attention.kernel.unit_of`).
Legend: S sequences, T tiles (rows of one sequence), I items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_kernels.arguments import ArgumentError, check_count, require
from moe_kernels.paged_attention.tiling import Tiling
from moe_kernels.paged_attention.trees import SEEN, TreeRows, check, seen_words

HEADER: Final = 8
ITEM: Final = 8
MERGED: Final = 4
PIECES: Final = 4
"""A program's share of the work is cut into so many items: the longest decides how uneven programs end."""
SHORTEST: Final = 256
"""Positions of a part, at least, where the batch decides: less does not pay for its merge. A share of fewer pieces is
cut into those, so that no program has one more than others."""
MAX_PARTS: Final = 128
_START: Final = 64
"""What an item costs before it reads its first position, in positions of a narrow tile."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The most that a list holds: ``rows`` of a step, its ``sequences``, ``positions`` of one of them, and what follows
    from these: ``items``, ``slots`` and rows to merge (``merged``). ``trees``: rows may branch. All are part of a CUDA
    graph."""

    rows: int
    sequences: int
    positions: int
    items: int
    slots: int
    merged: int
    trees: bool = False

    @property
    def merged_at(self) -> int:
        return HEADER + ITEM * self.items

    @property
    def seen_at(self) -> int:
        return self.merged_at + MERGED * self.merged

    @property
    def words(self) -> int:
        return self.seen_at + (SEEN * self.rows if self.trees else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiles:
    """``alone_T``: the only tile of its sequence. ``first_T`` is a multiple of the tiling's length."""

    sequence_T: Ints
    row_T: Ints
    rows_T: Ints
    position_T: Ints
    first_T: Ints
    end_T: Ints
    wide_T: NDArray[np.bool_]
    alone_T: NDArray[np.bool_]


class Planner:
    """Makes the lists of steps of one size, for layers with one window.

    Args:
        rows: of each step; those that no sequence has come out as 0.
        sequences: at most, in a step.
        positions: of a sequence, at most.
        window: a row sees the last ``window`` positions, its own included.
        split: None: the batch decides where the positions of a tile are cut. Else they are cut at multiples of
            ``split`` (a multiple of the tiling's length), where a sequence has at most one wide tile: what comes out
            for a sequence then depends on no other one, with the same tiling.
        slots: sums of parts, rows of float32, that there is memory for. None: as many as a step can need, which
            without ``split`` is bounded by the GPU's programs.
        trees: whether rows may branch.

    Raises:
        ArgumentError: a number is out of bounds.
    """

    def __init__(
        self,
        tiling: Tiling,
        *,
        rows: int,
        sequences: int,
        positions: int,
        window: int | None = None,
        split: int | None = None,
        slots: int | None = None,
        trees: bool = False,
    ) -> None:
        check_count("rows", rows, 0, 2**24)
        check_count("sequences", sequences, 0, 2**24)
        check_count("positions", positions, 1, 2**30)
        if window is not None:
            check_count("window", window, 1)
        if split is not None:
            check_count("split", split, tiling.length)
            fits = split % tiling.length == 0
            require(fits, f"split must be a multiple of the tiles' {tiling.length} positions, found {split}")
        if slots is not None:
            check_count("slots", slots, 0)
        self.tiling, self.window, self.split = tiling, window, split
        self.room = replace(_room(tiling, rows, sequences, positions, split, slots), trees=trees)

    def plan(
        self, rows_S: ArrayLike, kv_len_S: ArrayLike, trees: Mapping[int, TreeRows] = MappingProxyType({})
    ) -> NDArray[np.int32]:
        """Return the words of a step. Sequence s has the rows from ``sum(rows_S[:s])`` on.

        Args:
            rows_S: rows of each sequence in this step, 0 or more.
            kv_len_S: positions of each sequence, with those of this step, which are its last.
            trees: of each sequence whose rows branch; its positions here are places.

        Raises:
            ArgumentError: more rows, sequences, positions or slots than there is room for, more rows than positions, or
                a tree that does not fit.

        Example: 2 rows of a sequence of 5 positions and 1 of one of 3, room for 4 rows, narrow tiles of 4 rows: items
        (0, 0, 2, 3, 0, 5, -1, 0), (1, 2, 1, 2, 0, 3, -1, 0) and, for the row that is left, (2, 3, 1, -1, 0, 0, -1, 0).
        """
        rows_S, kv_len_S = self._checked(rows_S, kv_len_S)
        require(self.room.trees or not trees, "the list has no words for rows that branch: plan it with trees=True")
        check(trees, rows_S[:-1])
        tiles = self._tiles(rows_S, kv_len_S, trees)
        origin_T, each_T = self._cuts(tiles)
        parts_T = np.maximum(-(-(tiles.end_T - origin_T) // each_T), 1)
        room, words = self.room, np.empty(self.room.words, dtype=np.int32)
        items = int(parts_T.sum())
        assert items <= room.items, (items, room)
        words[:HEADER] = 0
        words[0] = items
        if room.trees:
            words[room.seen_at :] = seen_words(rows_S, kv_len_S, trees, self.window).ravel()
        into = words[HEADER : HEADER + ITEM * items].reshape(items, ITEM)
        if items == len(parts_T):  # nothing is cut
            self._sorted(tiles, tiles.first_T, tiles.end_T, np.full(items, -1), into)
        else:
            words[1] = self._parts(
                tiles, origin_T, each_T, parts_T, into, words[room.merged_at : room.seen_at].reshape(-1, MERGED)
            )
        return words

    def _checked(self, rows_S: ArrayLike, kv_len_S: ArrayLike) -> tuple[Ints, Ints]:
        """Both with one more sequence, without positions, that has the rows that are left."""
        room, count = self.room, np.shape(rows_S)
        if len(count) != 1 or np.shape(kv_len_S) != count:
            raise ArgumentError(f"rows and kv_len must be [S], found {count} and {np.shape(kv_len_S)}")
        require(count[0] <= room.sequences, f"there is room for {room.sequences} sequences, found {count[0]}")
        rows, kv_len = (np.zeros(count[0] + 1, dtype=np.int64) for _ in range(2))
        rows[:-1], kv_len[:-1] = rows_S, kv_len_S
        used, longest = int(rows.sum()), int(kv_len.max())
        require(used <= room.rows, f"there is room for {room.rows} rows, found {used}")
        require(longest <= room.positions, f"there is room for {room.positions} positions, found {longest}")
        fits = not count[0] or (int(rows.min()) >= 0 and int((kv_len - rows).min()) >= 0)
        require(fits, "rows must not be negative, nor more than the positions of their sequence")
        rows[-1] = room.rows - used
        return rows, kv_len

    def _tiles(self, rows_S: Ints, kv_len_S: Ints, trees: Mapping[int, TreeRows]) -> _Tiles:
        tiling = self.tiling
        wide_S = rows_S > (tiling.narrow_rows if tiling.wide else self.room.rows)
        height_S = np.where(wide_S, tiling.wide_rows, tiling.narrow_rows)
        count_S = -(-rows_S // height_S)
        sequence_T = np.repeat(np.arange(len(rows_S)), count_S)
        inside_T = (np.arange(len(sequence_T)) - (np.cumsum(count_S) - count_S)[sequence_T]) * height_S[sequence_T]
        rows_T = np.minimum(height_S[sequence_T], rows_S[sequence_T] - inside_T)
        position_T = (kv_len_S - rows_S)[sequence_T] + inside_T
        end_T = np.maximum(position_T + rows_T, 0)
        if self.window is None:
            first_T = np.zeros_like(end_T)
        else:
            oldest_T = position_T - np.where(np.isin(sequence_T, list(trees)), inside_T, 0)  # one may follow the first
            first_T = np.maximum(oldest_T - (self.window - 1), 0) // tiling.length * tiling.length
        return _Tiles(
            sequence_T=sequence_T, row_T=(np.cumsum(rows_S) - rows_S)[sequence_T] + inside_T, rows_T=rows_T,
            position_T=position_T, first_T=first_T, end_T=end_T, wide_T=wide_S[sequence_T],
            alone_T=count_S[sequence_T] == 1,
        )  # fmt: skip

    def _cuts(self, tiles: _Tiles) -> tuple[Ints, Ints]:
        """From where positions are counted, and how many a part has."""
        if self.split is not None:
            cut_T = tiles.alone_T | ~tiles.wide_T
            origin_T = np.where(cut_T, tiles.first_T // self.split * self.split, tiles.first_T)
            return origin_T, np.where(cut_T, self.split, self.room.positions)
        length, span_T = self.tiling.length, tiles.end_T - tiles.first_T
        weight_T = np.where(tiles.wide_T, self.tiling.wide_cost, 1.0)
        work = float((span_T * weight_T).sum()) + _START * len(span_T)
        share = work * self.tiling.kv_heads / self.tiling.programs
        piece = share / min(max(share // SHORTEST, 1), PIECES)
        parts_T = np.ceil(span_T / np.maximum(piece / weight_T, SHORTEST)).clip(1, MAX_PARTS)
        each_T = np.ceil(span_T / (parts_T * length)).astype(np.int64) * length
        return tiles.first_T, np.maximum(each_T, length)

    def _parts(
        self, tiles: _Tiles, origin_T: Ints, each_T: Ints, parts_T: Ints, into: NDArray[np.int32],
        merged: NDArray[np.int32],
    ) -> int:  # fmt: skip
        """Write the items of tiles of which some are cut, and the rows to merge; return the number of the latter."""
        tile_I, part_I = _numbered(parts_T)
        begin_I = origin_T[tile_I] + part_I * each_T[tile_I]
        end_I = np.minimum(begin_I + each_T[tile_I], tiles.end_T[tile_I])
        slots_T = np.where(parts_T > 1, parts_T * tiles.rows_T, 0)
        slot_T = np.cumsum(slots_T) - slots_T
        slot_I = np.where(parts_T[tile_I] > 1, slot_T[tile_I] + part_I * tiles.rows_T[tile_I], -1)
        used = int(slots_T.sum())
        require(used <= self.room.slots, f"there is room for {self.room.slots} slots, found {used}: split less often")
        whole = _Tiles(**{name: getattr(tiles, name)[tile_I] for name in _Tiles.__slots__})
        self._sorted(whole, np.maximum(begin_I, whole.first_T), end_I, slot_I, into)
        cut = np.flatnonzero(parts_T > 1)
        at, row = _numbered(tiles.rows_T[cut])
        tile = cut[at]
        columns = tiles.row_T[tile] + row, slot_T[tile] + row, tiles.rows_T[tile], parts_T[tile]
        for column, values in enumerate(columns):
            merged[: len(tile), column] = values
        return len(tile)

    def _sorted(self, tiles: _Tiles, begin_I: Ints, end_I: Ints, slot_I: Ints, into: NDArray[np.int32]) -> None:
        """Write items, ``tiles`` having one entry for each, the longest first."""
        cost_I = (begin_I - end_I) * np.where(tiles.wide_T, self.tiling.wide_cost, 1.0)
        order_I = np.argsort(cost_I)
        columns = (
            tiles.sequence_T, tiles.row_T, tiles.rows_T, tiles.position_T, begin_I, end_I, slot_I, tiles.wide_T,
        )  # fmt: skip
        for column, values in enumerate(columns):
            into[:, column] = values[order_I]


def _numbered(count_T: Ints) -> tuple[Ints, Ints]:
    """Each of ``count_T[t]`` things: its t, and its number among them.

    >>> [array.tolist() for array in _numbered(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    of = np.repeat(np.arange(len(count_T)), count_T)
    return of, np.arange(len(of)) - (np.cumsum(count_T) - count_T)[of]


def _room(tiling: Tiling, rows: int, sequences: int, positions: int, split: int | None, slots: int | None) -> Room:
    """What no list of so many rows exceeds: each sequence, and the rows that are left, have one tile that is not full,
    and some have full ones."""
    few = min(sequences, rows) + 1
    tallest = max(tiling.narrow_rows, tiling.wide_rows)
    full = rows // tallest
    if split is not None:
        parts = -(-positions // split)
        items = few * parts + full * (1 if tiling.wide else parts)
        cut = min(rows, few * tallest) if tiling.wide else rows
        most = cut * parts if parts > 1 else 0
    else:
        pieces = -(-PIECES * tiling.programs // tiling.kv_heads)
        longest = min(-(-positions // SHORTEST), MAX_PARTS)
        items = few + full + (min(pieces, (few + full) * (longest - 1)))
        most = min(2 * pieces * tallest, rows * longest) if longest > 1 else 0
    slots = most if slots is None else min(slots, most)
    return Room(
        rows=rows, sequences=sequences, positions=positions, items=items, slots=slots, merged=min(rows, slots // 2)
    )
