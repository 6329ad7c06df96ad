"""Attention of decode steps over a paged KV cache: one query row per sequence in, what it gathered out.

Legend: S sequences, N query heads, J key/value heads, G = N / J queries per key head, H head dimension, P cache blocks,
B positions per block, M most blocks of a sequence.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_count,
    check_device,
    check_no_gradient,
    check_sinks,
    describe,
    require,
    require_tensors,
)

EVERYTHING = 2**31 - 1
"""A window that hides nothing."""
_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def paged_decode(
    q_SNH: Tensor,
    k_PBJH: Tensor,
    v_PBJH: Tensor,
    blocks_SM: Tensor,
    kv_len_S: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """out[s, n] = sum over p of softmax_p(scale x q[s, n] . k[p, n // G]) v[p, n // G], p < kv_len[s].

    With a sink the softmax has one more logit, ``sinks[n]``, which takes its share and has no value.
    Position p of sequence s lies in the cache at block ``blocks[s, p // B]``, place ``p % B``; nothing else is read.
    Sums and the softmax are float32; keys and values are taken, and weights rounded, to ``q``'s dtype. Long sequences
    are cut into parts that are computed side by side and then summed (flash-decoding). How many programs run depends
    on S and M alone, so a CUDA graph can hold the call while lengths and blocks change.

    Args:
        q_SNH: float32, bfloat16 or float16, unit stride along the head; H at most 256.
        k_PBJH, v_PBJH: contiguous, on the same device; J divides N.
        blocks_SM: int32 or int64; what follows a sequence's last block may be anything.
        kv_len_S: int32 or int64, at most M x B. 0: the row comes out as 0 and nothing is read for it.
        scale: 1 / sqrt(H) if None.
        window: a row sees the last ``window`` positions, its own included.
        sinks_N: float32, bfloat16 or float16: one more logit for each query head.

    Returns:
        ``[S, N, H]`` in ``q``'s dtype, contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: H = 1, scale 1, q = [[[0]]], two positions with v = 2 and 4, kv_len 2: both weigh 1/2, out = [[[3]]]; with
    window 1, out = [[[4]]]; with a sink of 0 and no window, each of three weighs 1/3, out = [[[2]]].
    """
    _check(q_SNH, k_PBJH, v_PBJH, blocks_SM, kv_len_S)
    check_sinks(sinks_N, q_SNH)
    check_no_gradient("paged_decode", _INSTEAD, q=q_SNH, k=k_PBJH, v=v_PBJH, sinks=sinks_N)
    if window is not None:
        check_count("window", window, 1)
    scale = q_SNH.shape[2] ** -0.5 if scale is None else scale
    seen = EVERYTHING if window is None else min(window, EVERYTHING)
    if backend.use_triton(q_SNH) and q_SNH.numel():
        from moe_kernels.paged_decode.kernel import launch
    else:
        from moe_kernels.paged_decode.reference import launch
    with backend.device_of(q_SNH):
        return launch(q_SNH, k_PBJH, v_PBJH, blocks_SM, kv_len_S, sinks_N, scale, seen)


def _check(q_SNH: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, blocks_SM: Tensor, kv_len_S: Tensor) -> None:
    require_tensors(q=q_SNH, k=k_PBJH, v=v_PBJH, blocks=blocks_SM, kv_len=kv_len_S)
    require(q_SNH.dim() == 3 and q_SNH.dtype in FLOATS, f"q must be [S, N, H] in {FLOATS}, found {describe(q_SNH)}")
    sequences, heads, head_dim = q_SNH.shape
    require(1 <= head_dim <= 256, f"q must have heads of 1..256, found {describe(q_SNH)}")
    require(q_SNH.stride(2) == 1 or head_dim == 1, f"q must have unit stride along the head, found {describe(q_SNH)}")
    for name, cache in (("k", k_PBJH), ("v", v_PBJH)):
        fits = cache.dim() == 4 and cache.shape[3] == head_dim and cache.dtype in FLOATS and cache.is_contiguous()
        require(fits, f"{name} must be [P, B, J, {head_dim}] in {FLOATS}, contiguous, found {describe(cache)}")
        check_device(cache, q_SNH, name, "q")
    same = k_PBJH.shape == v_PBJH.shape and k_PBJH.dtype == v_PBJH.dtype
    require(same, f"k and v must be alike, found {describe(k_PBJH)} and {describe(v_PBJH)}")
    kv_heads = k_PBJH.shape[2]
    require(kv_heads >= 1 and heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} key heads")
    for name, tensor, dims in (("blocks [S, M]", blocks_SM, 2), ("kv_len [S]", kv_len_S, 1)):
        fits = tensor.dim() == dims and tensor.shape[0] == sequences and "int" in str(tensor.dtype)
        require(fits, f"{name} must be int32 or int64 of {sequences} rows, found {describe(tensor)}")
        check_device(tensor, q_SNH, name, "q")
