"""Attention over the paged KV cache. A step's sequences become index tensors and masks, once for all layers; then each
layer's queries, keys and values come in, and the attention output of each row goes out.

Where a step is ``paged``, as all steps on a GPU are, one kernel takes all rows: ``paged_decode`` where each sequence
has one, ``paged_attention`` by work lists where some have more (:mod:`services.model.work_lists`). Elsewhere torch
computes it, here or, where no row may notice the others, in :mod:`services.model.tiled_attention`.

Decode rows (one new token) of sequences of similar length share one call: a group is padded to its longest sequence by
reading blocks of each sequence again. A prompt piece is a call of its own.
Legend: T rows of the step, N query heads, K key/value heads, G = N / K queries per key head, H head dimension,
R how many dimensions of a head are rotated, S cache slots, B sequences of a decode group, M blocks per sequence, L
positions read, W rows of a prompt piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_attention.trees import TreeRows
from moe_kernels.paged_decode.op import paged_decode
from services.model import tiled_attention
from services.model.inputs import DecodeRows, PagedPieces, PagedRows, SequenceRows, StepInputs
from services.model.latent_plan import LatentPlan
from services.model.length_groups import group_by_length
from services.model.state_plan import StatePlan
from services.model.tiled_attention import Tiles
from services.model.transfer import upload

KeysValues = tuple[Tensor, Tensor]
_CALL_COST_ELEMENTS = 65_536
"""Cost of one more attention call, in key elements read: about 60 us on a CPU core at 1 ns each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Sequences with one row each. ``rows_B`` None: all rows of the step, in order.

    ``mask_B11L`` is 0 where a sequence may look and -inf elsewhere.
    """

    rows_B: Tensor | None
    blocks_BM: Tensor
    mask_B11L: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPiece:
    """The rows ``start .. start + length`` of one sequence. ``blocks_M`` None: they see only each other.

    ``mask_WL`` None: row w sees the rows up to its own.
    """

    start: int
    length: int
    blocks_M: Tensor | None
    mask_WL: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """The attention calls of a layer with one window size. With ``paged`` there is one call, of all rows; with
    ``tiles`` these have them all."""

    decode: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPiece, ...]
    paged: PagedRows | PagedPieces | None = None
    window: int | None = None
    tiles: tuple[Tiles, ...] = ()

    @property
    def reads_own(self) -> bool:
        """Whether the step's keys and values are needed besides the cache, where they may have been rounded."""
        return self.paged is None and not self.tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Plan of a step for all layers: where keys go, how rows are rotated, and for each window who sees whom; or, of a
    model whose keys and values come of latents, ``latent``."""

    slots_T: Tensor
    cos_T1R: Tensor
    sin_T1R: Tensor
    by_window: dict[int | None, WindowPlan]
    latent: LatentPlan | None = None
    states: StatePlan | None = None


class WindowPlanner:
    """Builds :class:`WindowPlan`, with masks in the dtype of attention.

    Args:
        kv_size: key elements per position and layer. They decide when padding costs more than another call.
    """

    def __init__(self, *, block_size: int, kv_size: int, mask_dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._call_cost_blocks = _CALL_COST_ELEMENTS / (kv_size * block_size)
        self._mask_dtype = mask_dtype
        self._device = device

    def plan(self, inputs: StepInputs, window: int | None) -> WindowPlan:
        if inputs.paged is not None:
            return WindowPlan(decode=(), prompts=(), paged=inputs.paged, window=window)
        few = [rows for rows in inputs.sequences if rows.length == 1]
        prompts = [rows for rows in inputs.sequences if rows.length > 1]
        decodes: list[DecodeGroup] = []
        if inputs.decodes is not None:
            decodes += self._decode_groups(inputs.decodes, np.arange(len(inputs.decodes.kv_len_B)), window)
        if few:
            decodes += self._decode_groups(self._as_arrays(few), np.array([rows.start for rows in few]), window)
        if len(decodes) == 1 and not prompts:
            decodes = [replace(decodes[0], rows_B=None)]
        return WindowPlan(decode=tuple(decodes), prompts=tuple(self._piece(rows, window) for rows in prompts))

    def _as_arrays(self, sequences: list[SequenceRows]) -> DecodeRows:
        held = [rows.blocks[: -(-rows.kv_len // self._block_size)] for rows in sequences]
        width = max(map(len, held))
        return DecodeRows(
            kv_len_B=np.array([rows.kv_len for rows in sequences]),
            blocks_BM=np.array([[*blocks, *(blocks[-1] for _ in range(width - len(blocks)))] for blocks in held]),
        )

    def _decode_groups(self, rows: DecodeRows, row_B: NDArray[np.int64], window: int | None) -> Iterator[DecodeGroup]:
        """Yield groups of ``rows``, whose numbers in the step are ``row_B``."""
        size, kv_len_B = self._block_size, rows.kv_len_B
        first_B = np.zeros_like(kv_len_B) if window is None else np.maximum(0, kv_len_B - window) // size
        length_B = -(-kv_len_B // size) - first_B
        for group_G in group_by_length(length_B, self._call_cost_blocks):
            column_L = np.arange(length_B[group_G].max())
            if window is None:
                blocks_GL = rows.blocks_BM[group_G, : len(column_L)]
            else:
                last_B = rows.blocks_BM.shape[1] - 1
                blocks_GL = rows.blocks_BM[group_G[:, None], np.minimum(first_B[group_G, None] + column_L, last_B)]
            last_G = upload((kv_len_B - 1 - first_B * size)[group_G], self._device)
            yield DecodeGroup(
                rows_B=upload(row_B[group_G], self._device),
                blocks_BM=upload(blocks_GL, self._device),
                mask_B11L=self._mask(last_G, len(column_L) * size, window)[:, None, None],
            )

    def _piece(self, rows: SequenceRows, window: int | None) -> PromptPiece:
        from_scratch = rows.kv_len == rows.length
        masked = not from_scratch or (window is not None and window < rows.kv_len)
        oldest = 0 if window is None or from_scratch else max(0, rows.kv_len - rows.length - window + 1)
        first = oldest // self._block_size
        blocks = None if from_scratch else rows.blocks[first : -(-rows.kv_len // self._block_size)]
        width = rows.kv_len if blocks is None else len(blocks) * self._block_size
        position_W = torch.arange(rows.kv_len - rows.length, rows.kv_len, device=self._device)
        mask_WL = self._mask(position_W - first * self._block_size, width, window) if masked else None
        if rows.tree is not None:
            known = rows.kv_len - rows.length + 1
            mask_WL = self._tree_mask(rows.tree, known - first * self._block_size, width, window)
        return PromptPiece(
            start=rows.start,
            length=rows.length,
            blocks_M=None if blocks is None else upload(np.array(blocks, dtype=np.int64), self._device),
            mask_WL=mask_WL,
        )

    def _tree_mask(self, tree: TreeRows, known: int, width: int, window: int | None) -> Tensor:
        """Return a mask ``[W, width]``: a row sees the ``known`` columns, of which the last is the first row's, with a
        window only the last ones before its own position, and its ancestors, which follow them."""
        node_A = np.arange(len(tree.depth_W) - 1, dtype=np.uint64)
        hidden_WL = np.ones((len(tree.depth_W), width), dtype=np.bool_)
        oldest_W1 = 0 if window is None else (known + tree.depth_W - window)[:, None]
        hidden_WL[:, :known] = np.arange(known) < oldest_W1
        hidden_WL[:, known : known + len(node_A)] = tree.within(window)[:, None] >> node_A & np.uint64(1) == 0
        mask_WL = torch.zeros(hidden_WL.shape, dtype=self._mask_dtype, device=self._device)
        return mask_WL.masked_fill_(upload(hidden_WL, self._device), -torch.inf)

    def _mask(self, position_R: Tensor, width: int, window: int | None) -> Tensor:
        """Return a mask ``[R, width]``: a row at position p sees columns up to p, with a window only the last ones."""
        column_L = torch.arange(width, device=self._device)
        hidden_RL = column_L > position_R.unsqueeze(1)
        if window is not None:
            hidden_RL |= column_L <= position_R.unsqueeze(1) - window
        mask_RL = torch.zeros(hidden_RL.shape, dtype=self._mask_dtype, device=self._device)
        return mask_RL.masked_fill_(hidden_RL, -torch.inf)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of attention: on a CPU float32, because its half-precision kernels are several times slower."""
    return torch.float32 if device.type == "cpu" else dtype


def attend(
    plan: WindowPlan, q_TNH: Tensor, own: KeysValues | None, cache: KeysValues, sinks_N: Tensor | None = None
) -> Tensor:
    """Return the attention output ``out_TE`` with E = N x H, in ``q``'s dtype.

    Args:
        own: the step's keys and values ``[T, K, H]``, which are already in ``cache``, too; if the plan needs them.
        cache: ``(k_NBKH, v_NBKH)`` of the layer.
        sinks_N: one more logit for each query head, which has no value; where the plan is ``paged`` or has ``tiles``.
    """
    paged = plan.paged
    if isinstance(paged, PagedPieces):
        return paged_attention(q_TNH, *cache, paged.blocks_SM, paged.work[plan.window], sinks_N=sinks_N).flatten(1)
    if paged is not None:
        return paged_decode(
            q_TNH, *cache, paged.blocks_BM, paged.kv_len_B, window=plan.window, sinks_N=sinks_N
        ).flatten(1)
    if plan.tiles:
        return tiled_attention.attend(plan.tiles, q_TNH, cache, sinks_N)
    assert sinks_N is None, "torch's attention has none"
    if len(plan.decode) == 1 and plan.decode[0].rows_B is None:
        return _decode(plan.decode[0], q_TNH, cache)
    out_TE = q_TNH.new_empty(q_TNH.shape[0], q_TNH.shape[1] * q_TNH.shape[2])
    for group in plan.decode:
        assert group.rows_B is not None
        out_TE.index_copy_(0, group.rows_B, _decode(group, q_TNH.index_select(0, group.rows_B), cache))
    for piece in plan.prompts:
        rows = slice(piece.start, piece.start + piece.length)
        assert own is not None
        out_TE[rows] = _prompt(piece, q_TNH[rows], own[0][rows], own[1][rows], cache)
    return out_TE


def _decode(group: DecodeGroup, q_BNH: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """Compute attention of one new row per sequence. Queries that share a key head form the rows of one product."""
    count, heads, head_dim = q_BNH.shape
    k_BKLH, v_BKLH = (_gather(part, group.blocks_BM, q_BNH.dtype) for part in cache)
    kv_heads = k_BKLH.shape[1]
    q_BKGH = q_BNH.view(count, kv_heads, heads // kv_heads, head_dim)
    out_BKGH = scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=group.mask_B11L)
    return out_BKGH.reshape(count, heads * head_dim)


def _prompt(piece: PromptPiece, q_WNH: Tensor, k_WKH: Tensor, v_WKH: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """Compute attention of one sequence's rows over its prefix, or over each other where there is none."""
    if piece.blocks_M is None:
        k_1KLH, v_1KLH = k_WKH.transpose(0, 1).unsqueeze(0), v_WKH.transpose(0, 1).unsqueeze(0)
    else:
        k_1KLH, v_1KLH = (_gather(part, piece.blocks_M.unsqueeze(0), q_WNH.dtype) for part in cache)
    out_1NWH = scaled_dot_product_attention(
        q_WNH.transpose(0, 1).unsqueeze(0),
        k_1KLH,
        v_1KLH,
        attn_mask=piece.mask_WL,
        is_causal=piece.mask_WL is None,
        enable_gqa=True,
    )
    return out_1NWH.squeeze(0).transpose(0, 1).flatten(1)


def _gather(cache_NBKH: Tensor, blocks_BM: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the blocks of each sequence in a row: ``[B, K, L, H]``, a view that lies in memory as ``[B, L, K, H]``."""
    count, blocks = blocks_BM.shape
    _, block_size, kv_heads, head_dim = cache_NBKH.shape
    flat_BMKH = cache_NBKH.flatten(1).index_select(0, blocks_BM.flatten()).to(dtype)
    return flat_BMKH.view(count, blocks * block_size, kv_heads, head_dim).transpose(1, 2)
