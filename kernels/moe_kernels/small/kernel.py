"""The layer at small T (about 2 to 256 tokens, few rows per expert): no sort, no copy of tokens by expert.

Two launches: gate, up and activation; down and the sum over slots. Tiles may ask for two more: the lists of each
expert's pairs before them (for quantised weights it also puts x's columns in their order), the sum after them.
In: tokens, experts' weights, the router's choice, tiles. Out: y. Nothing is read back to the host and no shape depends
on data, so all launches can be captured in a CUDA graph.
Legend: T tokens, K slots per token, S = T x K pairs, E experts here, F expert width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton
from torch import Tensor

from moe_kernels.activations.op import Activation, gated
from moe_kernels.quant.weight import QuantisedWeight
from moe_kernels.small.arguments import (
    MAX_PAIRS,
    Lists,
    Matrices,
    Pairs,
    block_c,
    block_s,
    in_words,
    launch_options,
    launch_pdl,
    make_lists,
    matrices,
    weight_arguments,
)
from moe_kernels.small.down_kernel import small_combine_kernel, small_down_kernel
from moe_kernels.small.in_kernel import small_in_kernel, small_lists_kernel

__all__ = ["MAX_PAIRS", "small_moe"]


def small_moe(
    x_TD: Tensor,
    w_in: Tensor | QuantisedWeight,
    w_down: Tensor | QuantisedWeight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: Activation = "swiglu",
    bias_in: Tensor | None = None,
    bias_down: Tensor | None = None,
    weights_on: Literal["output", "input"] = "output",
    keep_T: Tensor | None = None,
    local_E: Tensor | None = None,
    tiles_in: Mapping[str, int],
    tiles_down: Mapping[str, int],
) -> Tensor:
    """:func:`moe_kernels.fused_moe` for at most :data:`MAX_PAIRS` pairs. Arguments are not checked here.

    Args:
        x_TD: float32, bfloat16 or float16; rows contiguous.
        w_in: ``[E, 2F, D]``, gate rows first, or ``[E, F, D]`` if the activation is not gated. Contiguous.
        w_down: ``[E, D, F]``. Contiguous.
        ids_TK: int32 or int64, contiguous. Outside 0..E-1 (or of ``local_E``, then looked up in it): not here.
        weights_TK: float32, contiguous.
        keep_T: bool; tokens that are False get zeros and cost nothing.
        local_E: int32, the expert here for each id, -1 elsewhere.
        tiles_in, tiles_down: BLOCK_M (tokens), BLOCK_N (columns of h or y), BLOCK_K, num_warps, num_stages and, where
            0 is not meant: TMA (weights through TMA), EVICT_FIRST (weights leave the L2 first; pointers only), PDL,
            MAX_REGISTERS (per thread, so that more programs share a multiprocessor). ``tiles_in`` alone: LISTS_LAUNCH
            (find each expert's pairs in a launch before, for many pairs; quantised weights have it anyway).
            ``tiles_down`` alone: SPLIT_K, COMBINE_LAUNCH (sum the slots in a launch of its own), PARTS_FP32 (parts in
            float32, not in x's dtype).

    Returns:
        ``y_TD`` in x's dtype.
    """
    matrices_in, matrices_down = matrices(w_in), matrices(w_down)
    experts, hidden = matrices_down.stored.shape[:2]
    pairs = Pairs(
        ids=ids_TK, weights=weights_TK, local=None if local_E is None else local_E.contiguous(),
        keep=None if keep_T is None else keep_T.contiguous().view(torch.uint8),
        tokens=ids_TK.shape[0], slots=ids_TK.shape[1], known=0 if local_E is None else local_E.numel(), experts=experts,
    )  # fmt: skip
    assert pairs.count <= MAX_PAIRS
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if pairs.count == 0 or experts == 0:
        return y_TD.zero_()
    lists = make_lists(pairs, triton.cdiv(hidden, tiles_down["BLOCK_N"]), x_TD.device)
    h_SF = torch.empty(pairs.count, matrices_down.columns, dtype=x_TD.dtype, device=x_TD.device)
    words_in = in_words(matrices_in, x_TD, tiles_in)
    if words_in or tiles_in.get("LISTS_LAUNCH"):
        x_TD = small_lists(x_TD, pairs, lists, arranged=words_in, pdl=bool(tiles_in.get("PDL")))
    small_in(
        x_TD, matrices_in, h_SF, pairs, lists, activation=activation, bias=bias_in, scaled=weights_on == "input",
        h_arranged=in_words(matrices_down, h_SF, tiles_down), tiles=tiles_in,
    )  # fmt: skip
    weighted = weights_on == "output"
    small_down(h_SF, matrices_down, y_TD, pairs, lists, bias=bias_down, weighted=weighted, tiles=tiles_down)
    return y_TD


def small_lists(x_TD: Tensor, pairs: Pairs, lists: Lists, *, arranged: bool, pdl: bool) -> Tensor:
    """The launch before the first, if any: the lists, and x with its columns where quantised weights want them."""
    rows, hidden = x_TD.shape
    out_TD = torch.empty(rows, hidden, dtype=x_TD.dtype, device=x_TD.device) if arranged else x_TD
    small_lists_kernel[(max(pairs.candidates, rows) if arranged else pairs.candidates,)](
        x=x_TD, out=out_TD, stride_x=x_TD.stride(0), T=rows, C=pairs.candidates, D=hidden,
        COUNTERS=lists.arrived_B.numel(), BY_PAIR=pairs.by_pair, PDL=pdl, ARRANGE=arranged, BLOCK_S=block_s(pairs),
        BLOCK_C=block_c(lists), BLOCK_D=1024, **lists.arguments(), **pairs.arguments(), **launch_pdl(pdl),
    )  # fmt: skip
    return out_TD


def small_in(
    x_TD: Tensor,
    w: Matrices,
    h_SF: Tensor,
    pairs: Pairs,
    lists: Lists,
    *,
    activation: Activation,
    bias: Tensor | None,
    scaled: bool,
    h_arranged: bool,
    tiles: Mapping[str, int],
) -> None:
    """The first launch: h of every pair whose expert is here, and the lists."""
    width = h_SF.shape[1]
    blocks = triton.cdiv(width, tiles["BLOCK_N"])
    small_in_kernel[(blocks, pairs.candidates)](
        x=x_TD, h=h_SF, weights=pairs.weights, bias=bias if bias is not None else x_TD, stride_x=x_TD.stride(0),
        F=width, D=w.columns, COUNTERS=lists.arrived_B.numel(), BY_PAIR=pairs.by_pair, ACT=activation,
        GATED=gated(activation), HAS_BIAS=bias is not None, SCALED=scaled, H_ARRANGED=h_arranged,
        LISTED=bool(tiles.get("LISTS_LAUNCH")) or in_words(w, x_TD, tiles), BLOCK_S=block_s(pairs),
        BLOCK_C=block_c(lists), **lists.arguments(), **pairs.arguments(),
        **weight_arguments(w, width, w.columns, x_TD, tiles), **launch_options(w, tiles),
    )  # fmt: skip


def small_down(
    h_SF: Tensor,
    w: Matrices,
    y_TD: Tensor,
    pairs: Pairs,
    lists: Lists,
    *,
    bias: Tensor | None,
    weighted: bool,
    tiles: Mapping[str, int],
) -> None:
    """The second launch: y of every token; a third one sums the slots if the tiles say so."""
    hidden, width = y_TD.shape[1], w.columns
    weight = weight_arguments(w, hidden, width, h_SF, tiles)
    splits, depth = runs(width, weight["BLOCK_K"], tiles.get("SPLIT_K", 1))
    dtype = torch.float32 if tiles.get("PARTS_FP32") else y_TD.dtype
    parts = torch.empty(splits, pairs.count, hidden, dtype=dtype, device=y_TD.device)
    own_launch = bool(tiles.get("COMBINE_LAUNCH"))
    combine = {
        "parts": parts, "y": y_TD, "weights": pairs.weights, "T": pairs.tokens, "D": hidden, "WEIGHTED": weighted,
        "SPLIT_K": splits, "BLOCK_T": min(16, triton.next_power_of_2(pairs.tokens)), **pairs.arguments(),
    }  # fmt: skip
    small_down_kernel[(pairs.candidates * splits, lists.arrived_B.numel())](
        h=h_SF, bias=bias if bias is not None else h_SF, F=width, DEPTH=depth,
        BY_PAIR=pairs.by_pair, HAS_BIAS=bias is not None, COMBINE_IN_LAUNCH=not own_launch, **combine,
        **lists.arguments(), **weight, **launch_options(w, tiles),
    )  # fmt: skip
    if own_launch:
        combine["BLOCK_T"] = 1
        small_combine_kernel[(pairs.tokens, triton.cdiv(hidden, 256))](
            **combine, BLOCK_N=256, PDL=weight["PDL"], num_warps=2, **launch_pdl(weight["PDL"])
        )


def runs(width: int, block_k: int, max_runs: int) -> tuple[int, int]:
    """Split ``width`` into runs of whole blocks; return how many, at most ``max_runs`` and none empty, and how wide.

    A run that begins past the end would read scales past the end.
    Example: 768 columns in blocks of 256, at most 4 runs: 3 of 256. 1024 in blocks of 256, at most 3: 2 of 512.
    """
    blocks = triton.cdiv(width, block_k)
    each = triton.cdiv(blocks, max_runs)
    return int(triton.cdiv(blocks, each)), int(each * block_k)
