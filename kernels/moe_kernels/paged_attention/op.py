"""Attention of a whole step over a paged KV cache: any number of rows per sequence in, what they gathered out.

Legend: T rows of the step, S sequences, N query heads, J key/value heads, G = N / J query heads per key head, H head
dimension, P cache blocks, B positions per block, M most blocks of a sequence, W words of the work list.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_count,
    check_device,
    check_like,
    check_no_gradient,
    check_sinks,
    describe,
    is_integer,
    require,
    require_kind,
    require_tensors,
)
from moe_kernels.paged_attention.work import Work

EVERYTHING = 2**30
"""A window that hides nothing: as long as a sequence can be. A position less this one is still an int32, also one of a
row of no sequence, which is negative."""
_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def paged_attention(
    q_TNH: Tensor,
    k_PBJH: Tensor,
    v_PBJH: Tensor,
    blocks_SM: Tensor,
    work: Work,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """out[t, n] = sum over p of e^s[p] v[p, j] / (e^sink[n] + sum over p of e^s[p]), s[p] = scale x q[t, n] . k[p, j],
    j = n // G, over the positions p of row t's sequence up to its own, with a window the last ones of these.

    ``softcap`` c makes s[p] into c x tanh(s[p] / c); without sinks e^sink is 0. Position p of sequence s lies in the
    cache at block ``blocks[s, p // B]``, place ``p % B``; of a sequence nothing else is read. Which rows are whose, and
    how long each sequence is, the work list says, which :class:`moe_kernels.paged_attention.planner.Planner` makes on
    the host. Sums and the softmax are float32; keys and values are taken, and weights rounded, to ``q``'s dtype.

    No keys are gathered and no masks are made: besides the output there is memory for the sums of parts
    (``work.room.slots`` rows of float32), whose number is bounded. Two launches for all rows, or one where nothing can
    be cut. Parts are merged in order: equal lists give equal bits. NaN stays with its sequence.

    Args:
        q_TNH: float32, bfloat16 or float16, unit stride along the head; H at most 256. T is ``work.room.rows``.
        k_PBJH, v_PBJH: contiguous, on the same device; J divides N. With the keys and values of the step's rows.
        blocks_SM: int32 or int64, ``work.room.sequences`` rows or more; what follows a sequence's last block, and what
            lies before its window, may be anything.
        work: of a planner for heads like these.
        scale: 1 / sqrt(H) if None.
        softcap: a positive number.
        sinks_N: float32, bfloat16 or float16: one more logit for each query head, which has no value.

    Returns:
        ``[T, N, H]`` in ``q``'s dtype, contiguous. Rows of no sequence are 0.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: H = 1, scale 1, q = 0, two rows of one sequence, v = 2 and 4: out = 2 and 3; with a sink of 0: 1 and 2.
    """
    _check(q_TNH, k_PBJH, v_PBJH, blocks_SM, work, sinks_N)
    check_no_gradient("paged_attention", _INSTEAD, q=q_TNH, k=k_PBJH, v=v_PBJH, sinks=sinks_N)
    scale = q_TNH.shape[2] ** -0.5 if scale is None else scale
    check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap)
        require(softcap > 0, f"softcap must be positive, found {softcap}")
    window = EVERYTHING if work.window is None else min(work.window, EVERYTHING)
    if backend.use_triton(q_TNH) and q_TNH.numel():
        from moe_kernels.paged_attention.launch import launch
    else:
        from moe_kernels.paged_attention.reference import launch
    with backend.device_of(q_TNH):
        return launch(q_TNH, k_PBJH, v_PBJH, blocks_SM, work, scale, softcap, sinks_N, window)


def check_number(name: str, value: object) -> None:
    fits = (isinstance(value, float) or is_integer(value)) and math.isfinite(value)
    require_kind(fits, f"{name} must be a finite number", value)


def _check(
    q_TNH: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, blocks_SM: Tensor, work: Work, sinks_N: Tensor | None
) -> None:
    require_tensors(q=q_TNH, k=k_PBJH, v=v_PBJH, blocks=blocks_SM)
    require_kind(isinstance(work, Work), "work must be a Work", work)
    require(q_TNH.dim() == 3 and q_TNH.dtype in FLOATS, f"q must be [T, N, H] in {FLOATS}, found {describe(q_TNH)}")
    head_dim = q_TNH.shape[2]
    check_count("the size of q's heads", head_dim, 1, 256)
    require(q_TNH.stride(2) == 1 or head_dim == 1, f"q must have unit stride along the head, found {describe(q_TNH)}")
    _check_cache(q_TNH, k_PBJH, v_PBJH)
    _check_work(q_TNH, k_PBJH, blocks_SM, work)
    check_sinks(sinks_N, q_TNH)


def _check_cache(q_TNH: Tensor, k_PBJH: Tensor, v_PBJH: Tensor) -> None:
    _, heads, head_dim = q_TNH.shape
    for name, cache in (("k", k_PBJH), ("v", v_PBJH)):
        fits = cache.dim() == 4 and cache.shape[3] == head_dim and cache.dtype in FLOATS and cache.is_contiguous()
        require(fits, f"{name} must be [P, B, J, {head_dim}] in {FLOATS}, contiguous, found {describe(cache)}")
        check_device(cache, q_TNH, name, "q")
    same = k_PBJH.shape == v_PBJH.shape and k_PBJH.dtype == v_PBJH.dtype
    require(same, f"k and v must be alike, found {describe(k_PBJH)} and {describe(v_PBJH)}")
    kv_heads = k_PBJH.shape[2]
    require(kv_heads >= 1 and heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} key heads")


def _check_work(q_TNH: Tensor, k_PBJH: Tensor, blocks_SM: Tensor, work: Work) -> None:
    room, tiling = work.room, work.tiling
    rows, heads, head_dim = q_TNH.shape
    block, kv_heads = k_PBJH.shape[1:3]
    check_like(work.words_W, (room.words,), torch.int32, "the words of work")
    check_device(work.words_W, q_TNH, "work", "q")
    require(rows == room.rows, f"work is for {room.rows} rows, found q of {rows}")
    found, made = (kv_heads, heads // kv_heads, head_dim), (tiling.kv_heads, tiling.group, tiling.head_dim)
    require(found == made, f"work is for (key heads, queries of each, head) {made}, found {found}")
    fits = (
        blocks_SM.dim() == 2 and blocks_SM.shape[0] >= room.sequences and blocks_SM.shape[1] * block >= room.positions
    )
    fits &= blocks_SM.dtype in (torch.int32, torch.int64)
    wanted = f"[S >= {room.sequences}, M x {block} >= {room.positions}]"
    require(fits, f"blocks must be int32 or int64 {wanted}, found {describe(blocks_SM)}")
    check_device(blocks_SM, q_TNH, "blocks", "q")
