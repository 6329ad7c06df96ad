"""Attention on a CPU whose result for a row has the same bits whatever else is in the step.

torch's own attention adds in an order that depends on how many rows and positions it is given. Here every product has
one shape: the query heads of a few rows of one sequence (a tile) meet a chunk of positions that begins at a multiple of
its length, and chunks are added up one after the other. A row alone, among others of its prompt or beside other
sequences thus meets the same numbers in the same order; chunks that it does not see add zeros.

Keys and values are read from the cache, also those of the step itself, which the cache may have rounded.
Legend: T rows of the step, N query heads, J key/value heads, G = N / J, H head dimension, Z tiles, R rows of a tile,
M = R x G lines of a tile, C positions of a chunk, X chunks, L = X x C positions, B blocks, W rows of the step that are
in these tiles, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.invariant.reference import in_whole_vectors, whole_columns
from services.model.inputs import StepInputs
from services.model.length_groups import group_by_length
from services.model.spec import ModelSpec
from services.model.transfer import upload
from services.model.work_lists import sequences_of, trees_of

LINES: Final = 8
"""Of a tile, at least: fewer make more products of a prompt, more make those of a decode larger."""
CHUNK: Final = 64
"""Positions, at least; it is a multiple of a block."""
MAX_SCORES: Final = 1 << 23
"""Scores that are in memory at a time, 32 MB."""
PIECE: Final = 128
"""Rows of a prompt that meet the same positions: more read keys less often, and more of them in vain."""
CALL_COST: Final = 65_536
"""Cost of one more group of decodes, in key elements read."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of one prompt, or of sequences with a row each, and the chunks that they meet.

    ``rows_W`` are rows of the step, and ``place_W`` their places among the Z x R of the tiles; at other places nothing
    is. ``blocks_ZB`` are the blocks of the chunks; the tiles of a prompt have one line for all. ``hidden_XZRC`` says
    which positions of a chunk a row does not see.
    """

    rows_W: Tensor
    place_W: Tensor
    blocks_ZB: Tensor
    hidden_XZRC: Tensor


class TilePlanner:
    """Cuts steps into tiles.

    Args:
        block_size: positions of a block of the cache.
    """

    def __init__(self, spec: ModelSpec, block_size: int, device: torch.device) -> None:
        self._block_size, self._heads, self._device = block_size, spec.num_heads, device
        self._height = -(-LINES * spec.num_kv_heads // spec.num_heads)
        self._chunk = -(-CHUNK // block_size) * block_size
        self._call_cost_chunks = CALL_COST / (spec.kv_size * self._chunk)

    def plan(self, inputs: StepInputs, window: int | None) -> tuple[Tiles, ...]:
        """Return tiles that have all rows of a step, none of which branch: that would change orders of sums."""
        assert not trees_of(inputs)
        rows_S, kv_len_S, held_SB = sequences_of(inputs, self._block_size)
        last_S = -(-kv_len_S // self._block_size) - 1  # what follows a sequence's last block may hold NaN
        column_SB = np.minimum(np.arange(held_SB.shape[1]), last_S[:, None])
        table_SB = np.take_along_axis(held_SB, column_SB, axis=1).astype(np.int64)
        begin_S, few = np.cumsum(rows_S) - rows_S, np.flatnonzero(rows_S == 1)
        tiles = [
            self._decodes(begin_S[group_G], kv_len_S[group_G] - 1, table_SB[group_G], window)
            for group_G in self._groups(few, kv_len_S[few] - 1, window)
        ]
        for s in np.flatnonzero(rows_S > 1).tolist():
            position_W = np.arange(kv_len_S[s] - rows_S[s], kv_len_S[s])
            tiles += self._prompt(int(begin_S[s]), position_W, table_SB[s : s + 1], window)
        return tuple(tiles)

    def _groups(self, few_G: Ints, position_G: Ints, window: int | None) -> Iterator[Ints]:
        """Yield those of ``few_G`` that see about as many chunks, not more at a time than there is room for."""
        chunks_G = position_G // self._chunk - self._first_chunk(position_G, window) + 1
        for alike in group_by_length(chunks_G, self._call_cost_chunks):
            most = self._room(int(chunks_G[alike].max()))
            yield from (few_G[alike[start : start + most]] for start in range(0, len(alike), most))

    def _decodes(self, row_Z: Ints, position_Z: Ints, table_ZB: Ints, window: int | None) -> Tiles:
        position_ZR = np.repeat(position_Z[:, None], self._height, axis=1)
        return self._tiles(row_Z, np.arange(len(row_Z)) * self._height, position_ZR, table_ZB, window)

    def _prompt(self, row: int, position_T: Ints, table_1B: Ints, window: int | None) -> Iterator[Tiles]:
        """Yield the rows from ``row`` on, some tiles at a time."""
        tiles = self._room(int(position_T[-1]) // self._chunk + 1)
        most = min(max(1, PIECE // self._height), tiles) * self._height
        for start in range(0, len(position_T), most):
            position_W = position_T[start : start + most]
            place_W = np.arange(len(position_W))
            filled = np.minimum(np.arange(-(-len(place_W) // self._height) * self._height), len(place_W) - 1)
            position_ZR = position_W[filled].reshape(-1, self._height)
            yield self._tiles(row + start + place_W, place_W, position_ZR, table_1B, window)

    def _room(self, chunks: int) -> int:
        """How many tiles may see so many chunks at a time, at least one."""
        return max(1, MAX_SCORES // (self._height * self._heads * chunks * self._chunk))

    def _first_chunk(self, position: Ints, window: int | None) -> Ints:
        """The chunk with the oldest position that a row at ``position`` sees."""
        return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0) // self._chunk

    def _tiles(self, row_W: Ints, place_W: Ints, position_ZR: Ints, table_ZB: Ints, window: int | None) -> Tiles:
        """``table_ZB`` has a line for each tile, or one for all of them, which are then in the order of positions.

        A tile by itself is there twice: torch has another product for one matrix, which several threads divide.
        """
        position_ZR = np.repeat(position_ZR, 2, axis=0) if len(position_ZR) == 1 else position_ZR
        first_Z = self._first_chunk(position_ZR[: len(table_ZB), 0], window)
        chunks = int((position_ZR[:, -1] // self._chunk - first_Z).max()) + 1
        column_Z1L = (first_Z[:, None] * self._chunk + np.arange(chunks * self._chunk))[:, None]
        hidden_ZRL = column_Z1L > position_ZR[:, :, None]
        if window is not None:
            hidden_ZRL |= column_Z1L <= position_ZR[:, :, None] - window
        hidden_XZRC = hidden_ZRL.reshape(*position_ZR.shape, chunks, self._chunk).transpose(2, 0, 1, 3)
        column_ZB = np.minimum(column_Z1L[:, 0, :: self._block_size] // self._block_size, table_ZB.shape[1] - 1)
        return Tiles(
            rows_W=upload(row_W, self._device),
            place_W=upload(place_W, self._device),
            blocks_ZB=upload(np.take_along_axis(table_ZB, column_ZB, axis=1), self._device),
            hidden_XZRC=torch.from_numpy(np.ascontiguousarray(hidden_XZRC)).to(self._device),
        )


def attend(
    plan: tuple[Tiles, ...], q_TNH: Tensor, cache: tuple[Tensor, Tensor], sinks_N: Tensor | None = None
) -> Tensor:
    """Return the attention output ``out_TE`` with E = N x H, in ``q``'s dtype, float32.

    Args:
        sinks_N: one more logit for each query head, which has no value, in ``q``'s dtype.
        cache: ``(k_PBJH, v_PBJH)`` of the layer, with what the step's rows have put there.
    """
    out_TE = torch.empty_like(q_TNH).flatten(1)
    for tiles in plan:
        out_TE.index_copy_(0, tiles.rows_W, _attend(tiles, q_TNH[tiles.rows_W], cache, sinks_N))
    return out_TE


def _attend(tiles: Tiles, q_WNH: Tensor, cache: tuple[Tensor, Tensor], sinks_N: Tensor | None) -> Tensor:
    chunks, count, height, chunk = tiles.hidden_XZRC.shape
    kv_heads, size = cache[0].shape[2:]
    q_WNH = whole_columns(q_WNH * size**-0.5)
    q_JZRGH = _in_tiles(q_WNH, tiles).view(count, height, kv_heads, -1, q_WNH.shape[-1]).permute(2, 0, 1, 3, 4)
    q_JZMH = q_JZRGH.flatten(2, 3)
    lines = q_JZMH.shape[2]
    k_XJZCH, v_XJZCH = (_gather(part, tiles.blocks_ZB, chunk, count, q_WNH.dtype) for part in cache)
    scores_XJZMC = q_WNH.new_empty(chunks, kv_heads, count, lines, chunk)
    for x, j in np.ndindex(chunks, kv_heads):
        torch.bmm(q_JZMH[j], k_XJZCH[x, j].transpose(1, 2), out=scores_XJZMC[x, j])
    hidden_XZRC = tiles.hidden_XZRC
    by_row_XJZRGC = scores_XJZMC.view(chunks, kv_heads, count, height, -1, chunk)
    by_row_XJZRGC.masked_fill_(hidden_XZRC[:, None, :, :, None], -torch.inf)
    top_JZM = scores_XJZMC.amax(dim=-1).amax(dim=0)
    scores_XJZMC -= top_JZM.unsqueeze(-1)
    weights_XJZMC = in_whole_vectors(torch.exp, scores_XJZMC)
    totals_XJZM = weights_XJZMC.sum(dim=-1)
    total_JZM, out_JZMH = torch.zeros_like(totals_XJZM[0]), torch.zeros_like(q_JZMH)
    if sinks_N is not None:  # far above all scores it is infinite, and the row 0
        total_JZM += in_whole_vectors(torch.exp, sinks_N.view(kv_heads, 1, -1).repeat(1, count, height) - top_JZM)
    for x in range(chunks):
        total_JZM += totals_XJZM[x]
        for j in range(kv_heads):
            out_JZMH[j].baddbmm_(weights_XJZMC[x, j], v_XJZCH[x, j])
    out_JZMH /= total_JZM.unsqueeze(-1)
    out_ZRJGH = out_JZMH[..., :size].reshape(kv_heads, count, height, -1, size).permute(1, 2, 0, 3, 4)
    return out_ZRJGH.reshape(count * height, -1)[tiles.place_W]


def _in_tiles(q_WNH: Tensor, tiles: Tiles) -> Tensor:
    """``[Z x R, N, H]``, zeros where no row is."""
    _, count, height, _ = tiles.hidden_XZRC.shape
    return q_WNH.new_zeros(count * height, *q_WNH.shape[1:]).index_copy_(0, tiles.place_W, q_WNH)


def _gather(cache_PBJH: Tensor, blocks_ZB: Tensor, chunk: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the chunks of each of ``count`` tiles: a view ``[X, J, Z, C, H]``, of whose Z some may be the same."""
    kv_heads = cache_PBJH.shape[2]
    held = whole_columns(cache_PBJH.index_select(0, blocks_ZB.flatten()).to(dtype))
    by_tile_ZXCJH = held.view(len(blocks_ZB), -1, chunk, kv_heads, held.shape[-1])
    return by_tile_ZXCJH.permute(1, 3, 0, 2, 4).expand(-1, -1, count, -1, -1)
