"""Attention of rows over a paged cache of latents (DeepSeek-V2, section 2.1.2): all query heads read one key.

Legend: S rows, N query heads, Z numbers of a latent, C = rank those of them that are the value, P cache blocks, B
positions per block, M most blocks of a row's sequence.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_count,
    check_device,
    check_no_gradient,
    describe,
    require,
    require_tensors,
)

LARGEST = 576
"""Numbers of a latent, at most: those of DeepSeek-V3, which fill a multiprocessor's shared memory."""
_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def paged_latent(
    q_SNZ: Tensor, latents_PBZ: Tensor, blocks_SM: Tensor, kv_len_S: Tensor, *, rank: int, scale: float
) -> Tensor:
    """out[s, n] = sum over p of softmax_p(scale x q[s, n] . latent[p]) latent[p, :rank], p < kv_len[s].

    Position p of row s lies in the cache at block ``blocks[s, p // B]``, place ``p % B``; nothing else is read. Sums
    and the softmax are float32; latents are taken, and weights rounded, to ``q``'s dtype. Long sequences are cut into
    parts that are computed side by side and then summed (flash-decoding). How many programs run depends on S and M
    alone, so a CUDA graph can hold the call while lengths and blocks change.

    Args:
        q_SNZ: float32, bfloat16 or float16, contiguous; Z at most 576.
        latents_PBZ: any of these dtypes, contiguous, on the same device.
        blocks_SM: int32 or int64; what follows a sequence's last block may be anything.
        kv_len_S: int32 or int64, at most M x B. 0: the row comes out as 0 and nothing is read for it.
        rank: how many numbers of a latent are the value: 1..Z and at most 512.

    Returns:
        ``[S, N, C]`` in ``q``'s dtype, contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: Z = 2, rank 1, scale 1, q = [[[0, 1]]], two positions [2, 0] and [4, log 3], kv_len 2: they weigh 1/4 and
    3/4, out = [[[3.5]]].
    """
    _check(q_SNZ, latents_PBZ, blocks_SM, kv_len_S, rank)
    check_no_gradient("paged_latent", _INSTEAD, q=q_SNZ, latents=latents_PBZ)
    if backend.use_triton(q_SNZ) and q_SNZ.numel():
        from moe_kernels.paged_latent.kernel import launch
    else:
        from moe_kernels.paged_latent.reference import launch
    with backend.device_of(q_SNZ):
        return launch(q_SNZ, latents_PBZ, blocks_SM, kv_len_S, rank, scale)


def _check(q_SNZ: Tensor, latents_PBZ: Tensor, blocks_SM: Tensor, kv_len_S: Tensor, rank: int) -> None:
    require_tensors(q=q_SNZ, latents=latents_PBZ, blocks=blocks_SM, kv_len=kv_len_S)
    fits = q_SNZ.dim() == 3 and q_SNZ.dtype in FLOATS and q_SNZ.is_contiguous()
    require(fits, f"q must be [S, N, Z] in {FLOATS}, contiguous, found {describe(q_SNZ)}")
    rows, heads, size = q_SNZ.shape
    require(heads >= 1 and 1 <= size <= LARGEST, f"q must have heads, of 1..{LARGEST}, found {describe(q_SNZ)}")
    check_count("rank", rank, 1)
    require(rank <= min(size, 512), f"rank must be at most {min(size, 512)}, found {rank}")
    fits = latents_PBZ.dim() == 3 and latents_PBZ.shape[2] == size and latents_PBZ.dtype in FLOATS
    fits = fits and latents_PBZ.is_contiguous() and latents_PBZ.shape[1] >= 1
    require(fits, f"latents must be [P, B, {size}] in {FLOATS}, contiguous, found {describe(latents_PBZ)}")
    check_device(latents_PBZ, q_SNZ, "latents", "q")
    for name, tensor, dims in (("blocks [S, M]", blocks_SM, 2), ("kv_len [S]", kv_len_S, 1)):
        fits = tensor.dim() == dims and tensor.shape[0] == rows and "int" in str(tensor.dtype)
        require(fits, f"{name} must be int32 or int64 of {rows} rows, found {describe(tensor)}")
        check_device(tensor, q_SNZ, name, "q")
