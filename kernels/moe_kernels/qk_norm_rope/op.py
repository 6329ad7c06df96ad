"""From the fused projection to attention: queries and keys are normed and rotated, keys and values put into the cache.

Legend: T rows, N query heads, J key/value heads, C = N + J, O = (N + 2 J) x H columns of the projection, H head
dimension, R how many of it are rotated, I = R / 2, P cache blocks, B positions per block.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_device,
    check_like,
    check_no_gradient,
    describe,
    require,
    require_tensors,
)

Norm = Literal["head", "projection"]
_INSTEAD = "call it under torch.no_grad() or inference_mode()"


@backend.eager
def qk_norm_rope_write(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    k_PBJH: Tensor,
    v_PBJH: Tensor,
    slots_T: Tensor,
    *,
    norm: Norm = "head",
    weight_CH: Tensor | None = None,
    eps: float = 0.0,
    clip: float | None = None,
    kv: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """q = rope(norm(q)), k = rope(norm(k)); row t's key and value go to place ``slots[t]`` of the cache.

    A row of ``qkv_TO`` holds N query heads, then J key heads, then J value heads. With ``norm`` "head",
    each of the first C is clamped to -clip..clip, divided by the root of its own mean square (plus eps), rounded, times
    its weight, rounded. With "projection" all query heads together, and all key heads together, are divided by the
    root of their mean square and multiplied by their weights, rounded once, and then clamped. Values are clamped.
    Then rope(a) = a x cos + swap(a) x sin in float32 of the first R elements of a head, where swap exchanges their
    halves (Su et al. 2021, eq. 34, pairs (i, i + I)), rounded once. The others stay as they are.

    Args:
        qkv_TO: float32, bfloat16 or float16, which is the dtype that is rounded to.
        cos_T1R: float32, R even and at most H; both halves of a row hold the cosines of its I angles. R may be 0.
        sin_T1R: float32; the first half holds the negative sines, the second one the sines.
        k_PBJH, v_PBJH: contiguous, of any of these dtypes, on the same device; written.
        slots_T: int64 within 0..P x B - 1, place ``slot % B`` of block ``slot // B``. Where two rows name one slot,
            either may stay.
        weight_CH: of the norm, in ``qkv``'s dtype, query heads first; None: there is no norm.
        clip: None clamps nothing.
        kv: whether keys and values are returned, too.
        interleaved: pairs are (2i, 2i + 1) instead.

    Returns:
        ``q_TNH``, and ``(k_TJH, v_TJH)`` or None, in ``qkv``'s dtype. On CUDA one launch, all contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not fit; or a gradient is asked for, which this op does not have.

    Example: H = 2, one query and one key head, a row [3, 4, 6, 8, 1, 2], weights [[1, 1], [1, 1]], eps 0: the norms are
    [0.8485, 1.1314] for both; with cos [0, 0] and sin [-1, 1] q = [-1.1314, 0.8485], which goes into the cache for k,
    and [1, 2] for v.
    """
    heads = _check(qkv_TO, cos_T1R, sin_T1R, k_PBJH, v_PBJH, slots_T)
    _check_options(qkv_TO, weight_CH, heads + k_PBJH.shape[2], k_PBJH.shape[3], norm, clip)
    check_no_gradient("qk_norm_rope_write", _INSTEAD, qkv=qkv_TO, weight=weight_CH, k=k_PBJH, v=v_PBJH)
    if backend.use_triton(qkv_TO) and qkv_TO.numel():
        from moe_kernels.qk_norm_rope.kernel import launch
    else:
        from moe_kernels.qk_norm_rope.reference import launch
    with backend.device_of(qkv_TO):
        return launch(
            qkv_TO, cos_T1R, sin_T1R, k_PBJH, v_PBJH, slots_T,
            norm=norm, weight_CH=weight_CH, eps=eps, clip=clip, kv=kv, interleaved=interleaved,
        )  # fmt: skip


def _check(qkv_TO: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, k_PBJH: Tensor, v_PBJH: Tensor, slots_T: Tensor) -> int:
    """Returns how many query heads there are."""
    require_tensors(qkv=qkv_TO, cos=cos_T1R, sin=sin_T1R, k=k_PBJH, v=v_PBJH, slots=slots_T)
    fits = qkv_TO.dim() == 2 and qkv_TO.dtype in FLOATS and (qkv_TO.stride(1) == 1 or qkv_TO.shape[1] == 1)
    require(fits, f"qkv must be [T, O] in {FLOATS} with unit stride along a row, found {describe(qkv_TO)}")
    for name, cache in (("k", k_PBJH), ("v", v_PBJH)):
        fits = cache.dim() == 4 and cache.dtype in FLOATS and cache.is_contiguous() and cache.shape == k_PBJH.shape
        require(fits, f"{name} must be [P, B, J, H] in {FLOATS}, contiguous, both alike, found {describe(cache)}")
        check_device(cache, qkv_TO, name, "qkv")
    rows, columns = qkv_TO.shape
    kv_heads, size = k_PBJH.shape[2:]
    require(2 <= size <= 512 and size % 2 == 0, f"heads must be even and in 2..512, found {describe(k_PBJH)}")
    heads = columns // size - 2 * kv_heads
    fits = columns % size == 0 and kv_heads >= 1 and heads >= 1
    require(fits, f"qkv must hold query heads and twice {kv_heads} heads of {size}, found {describe(qkv_TO)}")
    rotated = cos_T1R.shape[2] if cos_T1R.dim() == 3 else size
    fits = rotated % 2 == 0 and rotated <= size
    require(fits, f"cos must hold an even number of at most {size} elements for each row, found {describe(cos_T1R)}")
    for name, angles in (("cos", cos_T1R), ("sin", sin_T1R)):
        check_like(angles, (rows, 1, rotated), torch.float32, f"{name} [T, 1, R]")
        check_device(angles, qkv_TO, name, "qkv")
    check_like(slots_T, (rows,), torch.int64, "slots [T]")
    check_device(slots_T, qkv_TO, "slots", "qkv")
    return heads


def _check_options(
    qkv_TO: Tensor, weight_CH: Tensor | None, normed: int, size: int, norm: str, clip: float | None
) -> None:
    require(norm in get_args(Norm), f"norm must be one of {get_args(Norm)}, found {norm!r}")
    require(clip is None or clip > 0, f"clip must be positive, found {clip}")
    if weight_CH is not None:
        require_tensors(weight=weight_CH)
        check_like(weight_CH, (normed, size), qkv_TO.dtype, "weight [N + J, H]")
        check_device(weight_CH, qkv_TO, "weight", "qkv")
