"""Calls of the product's ops whose launches are compiled: of what services serve, in the shapes of models.

Each entry of :data:`SERVED` and :data:`OFFERED` is a call with tensors that have no memory, for
:func:`testkit.gpu.absent.recorded`. Legend: T rows, D hidden size, E experts, F expert width, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor, empty

from moe_kernels import (
    QuantisedWeight,
    combine,
    count_pairs,
    dequantize_experts,
    fused_moe,
    grouped_mlp,
    plan,
    quantised_linear,
    route,
)
from moe_kernels import tiles as table
from moe_kernels.activations.op import Activation, gated
from moe_kernels.add_rms_norm.op import add_rms_norm
from moe_kernels.exchange.joined.op import send_joined, take_joined
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import WORDS, Layout
from moe_kernels.exchange.op import send_answers, send_rows, sum_answers, take_rows
from moe_kernels.invariant import op as invariant
from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.tiling import tiling_for
from moe_kernels.paged_attention.work import Work
from moe_kernels.paged_decode.op import paged_decode
from moe_kernels.paged_latent.op import paged_latent
from moe_kernels.qk_norm_rope.op import Norm, qk_norm_rope_write
from moe_kernels.rotary.op import rotate_heads
from moe_kernels.training.parallel_linear import _ParallelLinear
from moe_kernels.training.sparse_mlp import _SparseMlp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TUNED = {"E": 128, "D": 2048, "F": 768, "K": 8}
"""Qwen3-30B-A3B, which the H200's table has entries of."""
WIDE = {"E": 8, "D": 4096, "F": 14336, "K": 2}
"""Mixtral-8x7B, likewise."""
GPT_OSS = {"E": 32, "D": 2880, "F": 2880, "K": 4}
"""gpt-oss-20b: 2,880 columns are 22.5 runs of 128."""
MXFP4 = {"bits": 4, "group": 32, "codes": "e2m1"}
FP8 = {"bits": 8, "group": 128, "codes": "e4m3", "scale_rows": 128}
ODD = {"E": 5, "D": 100, "F": 36, "K": 3}
"""Nothing is a multiple of a tile or of 16 bytes."""


def experts(
    dtype: str,
    rows: int,
    *,
    shape: dict[str, int] = TUNED,
    ids: torch.dtype = torch.int64,
    local: bool = False,
    bits: int = 16,
    group: int = 128,
    kind: dict[str, Any] | None = None,
    activation: str = "swiglu",
    bias: bool = False,
    keep: bool = False,
    block_rows: int | None = None,
    **options: Any,
) -> None:
    """fused_moe. ``local``: as of a worker that holds half of the experts; ``block_rows``: with a plan made before."""
    E, D, F, K = (shape[name] for name in "EDFK")
    floats, inner = DTYPES[dtype], F * (1 + gated(activation))
    packed_as = kind or ({"bits": bits, "group": group} if bits < 16 else None)
    w_in, w_down = (
        packed(E, o, i, **packed_as) if packed_as else empty(E, o, i, dtype=floats) for o, i in ((inner, D), (D, F))
    )
    ids_TK = empty(rows, K, dtype=ids)
    fused_moe(
        empty(rows, D, dtype=floats), w_in, w_down, ids_TK, empty(rows, K), activation=activation,
        plan=plan(ids_TK, E, block_rows=block_rows) if block_rows else None,
        local_E=empty(2 * E, dtype=torch.int32) if local else None,
        keep_T=empty(rows, dtype=torch.bool) if keep else None,
        bias_in=empty(E, inner, dtype=floats) if bias else None,
        bias_down=empty(E, D, dtype=floats) if bias else None, **options,
    )  # fmt: skip


def tiled(op: str, tiles: dict[str, int], call: Callable[[], object]) -> None:
    """``call`` as a tile table with other entries of ``op`` would have it."""
    shape = {"d": TUNED["D"], "f": TUNED["F"], "E": TUNED["E"], "k": TUNED["K"], "gated": 2}
    tuned = table.tiles(op, shape=shape, rows=16, dtype="bf16", device_name="NVIDIA H200")
    with table.overridden({op: {**tuned, **tiles}}):
        call()


def rounded_rows(dtype: str, rows: int, *, scale_rows: int = 128, **options: Any) -> None:
    """fused_moe of FP8 weights, whose rows are rounded as well."""
    call = partial(experts, dtype, rows, kind={**FP8, "scale_rows": scale_rows}, **options)
    tiled("rounded_rows", {"FROM_ROWS": 1}, call)


def packed(experts: int, outputs: int, inputs: int, **kind: Any) -> QuantisedWeight:
    return QuantisedWeight.empty((experts, outputs, inputs), device=empty(0).device, **kind)


def count(experts: int, rows: int) -> None:
    count_pairs(empty(experts, dtype=torch.int64), empty(rows, 8, dtype=torch.int64))


def router(experts: int, top_k: int, rows: int = 64, *, keep: bool = False, bias: bool = False, **flags: Any) -> None:
    keep_T = empty(rows, dtype=torch.bool) if keep else None
    bias_E = empty(experts) if bias else None
    route(empty(rows, experts), top_k=top_k, keep_T=keep_T, correction_bias_E=bias_E, **flags)


def decode(
    dtype: str, heads: int, kv_heads: int, size: int, *, sequences: int = 32, block: int = 16, length: int = 8192,
    window: int | None = None, sinks: bool = False,
) -> None:  # fmt: skip
    kind = DTYPES[dtype]
    sinks_N = empty(heads) if sinks else None
    cache = [empty(4096, block, kv_heads, size, dtype=kind) for _ in "kv"]
    blocks_SM = empty(sequences, -(-length // block), dtype=torch.int32)
    kv_len_S = empty(sequences, dtype=torch.int32)
    q_SNH = empty(sequences, heads, size, dtype=kind)
    paged_decode(q_SNH, *cache, blocks_SM, kv_len_S, window=window, sinks_N=sinks_N)


def latents(
    dtype: str, heads: int, size: int, rank: int, *, rows: int = 32, block: int = 16, length: int = 8192
) -> None:
    kind = DTYPES[dtype]
    blocks_SM, kv_len_S = empty(rows, -(-length // block), dtype=torch.int32), empty(rows, dtype=torch.int32)
    q_SNZ, cache_PBZ = empty(rows, heads, size, dtype=kind), empty(4096, block, size, dtype=kind)
    paged_latent(q_SNZ, cache_PBZ, blocks_SM, kv_len_S, rank=rank, scale=0.1)


def attention(
    dtype: str, heads: int, kv_heads: int, size: int, *, prompts: bool = True, block: int = 16, positions: int = 32768,
    window: int | None = None, softcap: float | None = None, sinks: bool = False, uniform: bool = False,
    trees: bool = False,
) -> None:  # fmt: skip
    """paged_attention. Nothing is planned: launches do not depend on a list's contents."""
    kind, rows, sequences = DTYPES[dtype], 2048 if prompts else 256, 256
    tiling = tiling_for(
        heads=heads, kv_heads=kv_heads, head_dim=size, itemsize=kind.itemsize, prompts=prompts,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        warpgroups=torch.cuda.get_device_capability(0) >= (9, 0),
    )  # fmt: skip
    tiling = tiling.uniform() if uniform else tiling
    planner = Planner(
        tiling, rows=rows, sequences=sequences, positions=positions, window=window, trees=trees,
        split=4096 if uniform else None,
    )  # fmt: skip
    words_W = empty(planner.room.words, dtype=torch.int32)
    paged_attention(
        empty(rows, heads, size, dtype=kind), *(empty(4096, block, kv_heads, size, dtype=kind) for _ in "kv"),
        empty(sequences, -(-positions // block), dtype=torch.int32),
        Work(words_W=words_W, room=planner.room, tiling=tiling, window=window),
        softcap=softcap, sinks_N=empty(heads, dtype=kind) if sinks else None,
    )  # fmt: skip


def invariant_experts(
    dtype: str,
    *,
    shape: dict[str, int] = TUNED,
    local: bool = False,
    bias: bool = False,
    activation: Activation = "swiglu",
) -> None:
    """moe_kernels.invariant.op.experts, whose launches do not depend on the rows."""
    E, D, F, K = (shape[name] for name in "EDFK")
    kind, rows = DTYPES[dtype], 300
    invariant.experts(
        empty(rows, D, dtype=kind), empty(E, 2 * F, D, dtype=kind), empty(E, D, F, dtype=kind),
        empty(rows, K, dtype=torch.int64), empty(rows, K), local_E=empty(2 * E, dtype=torch.int32) if local else None,
        activation=activation, bias_in=empty(E, 2 * F, dtype=kind) if bias else None,
        bias_down=empty(E, D, dtype=kind) if bias else None,
    )  # fmt: skip


def invariant_linear(dtype: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
    kind = DTYPES[dtype]
    bias_O = empty(outputs, dtype=kind) if bias else None
    invariant.linear(empty(300, inputs, dtype=kind), empty(outputs, inputs, dtype=kind), bias_O)


def exchange(
    dtype: str, bucket: int, *, unsummed: bool = False, shared_gpu: bool = False, hidden: int = 2048, members: int = 2
) -> None:
    """A layer's exchange at both sides, as services.fabric.shared_memory drives it, and one of joined calls."""
    rows, E, groups = bucket - bucket // 4, 128, 2
    layout = Layout(rows=max(bucket, 512), hidden=hidden, slots=8, dtype=DTYPES[dtype], unsummed=unsummed)
    words, counts_E = empty(WORDS, dtype=torch.int64), empty(E, dtype=torch.int64)
    groups_E, weights_TK = empty(E, dtype=torch.int32), empty(rows, 8)
    ids_TK = empty(rows, 8, dtype=torch.int64)
    step: dict[str, Any] = {"layout": layout, "bucket": bucket, "exchange": 3, "micro_batch": 1}
    x_TD = empty(rows, hidden, dtype=layout.dtype)
    send_rows(x_TD, ids_TK, weights_TK, groups_E, counts_E, words, groups=groups, **step)
    inbox, taken_RK = empty(layout.inbox_bytes, dtype=torch.uint8), empty(bucket, 8, dtype=torch.int32)
    take_rows(inbox, taken_RK, counts_E, words, **step)
    answers = empty(bucket * layout.answer_slots, hidden, dtype=layout.dtype)
    send_answers(answers, taken_RK, counts_E, words, **step)
    sum_answers(ids_TK, weights_TK, groups_E, words, groups=groups, shared_gpu=shared_gpu, **step)
    joined = Joined.room(members * bucket, layout, x_TD.device)
    call: dict[str, Any] = {"layout": layout, "members": members, "bucket": bucket, "exchange": 3}
    take_joined(joined, words, **call)
    send_joined(torch.cat([answers] * members), joined, counts_E, words, **call)


def sums(dtype: str, hidden: int, rows: int = 64) -> None:
    """combine, as the TCP link sums its answers."""
    combine(empty(300, hidden, dtype=DTYPES[dtype]), empty(rows, 8, dtype=torch.int64), empty(rows, 8))


def normed(dtype: str, hidden: int, rows: int = 64, *, added: int = 1) -> None:
    x_TD, *others = (empty(rows, hidden, dtype=DTYPES[dtype]) for _ in range(1 + added))
    y_TD, z_TD = [*others, None, None][:2]
    add_rms_norm(x_TD, y_TD, empty(hidden, dtype=DTYPES[dtype]), 1e-6, z_TD=z_TD)


def projected(
    dtype: str, heads: int, kv_heads: int, size: int, *, rows: int = 64, norm: Norm | None = "head",
    clip: float | None = None, kv: bool = False, rotated: int | None = None, interleaved: bool = False,
) -> None:  # fmt: skip
    kind, rotated = DTYPES[dtype], size if rotated is None else rotated
    qkv_TO = empty(rows, (heads + 2 * kv_heads) * size, dtype=kind)
    cache = [empty(4096, 16, kv_heads, size, dtype=kind) for _ in "kv"]
    weight_CH = None if norm is None else empty(heads + kv_heads, size, dtype=kind)
    qk_norm_rope_write(
        qkv_TO, empty(rows, 1, rotated), empty(rows, 1, rotated), *cache, empty(rows, dtype=torch.int64),
        norm=norm or "head", weight_CH=weight_CH, eps=1e-6, clip=clip, kv=kv, interleaved=interleaved,
    )  # fmt: skip


def planned(rows: int, experts: int = 128, *, keep: bool = False, local: bool = False, **options: Any) -> None:
    keep_T = empty(rows, dtype=torch.bool) if keep else None
    local_E = empty(2 * experts, dtype=torch.int32) if local else None
    plan(empty(rows, 8, dtype=torch.int64), experts, keep_T=keep_T, local_E=local_E, **options)


def grouped(dtype: str, rows: int) -> None:
    E, D, F = (TUNED[name] for name in "EDF")
    kind = DTYPES[dtype]
    w_in, w_down = empty(E, 2 * F, D, dtype=kind), empty(E, D, F, dtype=kind)
    grouped_mlp(empty(rows, D, dtype=kind), empty(E, dtype=torch.int64), w_in, w_down)


def trained_mlp(dtype: str, activation: str, *, bias: bool, shape: dict[str, int] = TUNED) -> None:
    """sparse_mlp, forward and backward."""
    E, D, F, K = (shape[name] for name in "EDFK")
    kind, rows, inner = DTYPES[dtype], 1024, F * (1 + gated(activation))
    order = plan(empty(rows, K, dtype=torch.int64), E)
    biases = (empty(E, inner, dtype=kind), empty(E, D, dtype=kind)) if bias else (None, None)
    x_TD, w_in, w_out = (empty(*sizes, dtype=kind) for sizes in ((rows, D), (E, inner, D), (E, D, F)))
    _differentiated(_SparseMlp, x_TD, w_in, w_out, empty(rows, K), *biases, order, activation)


def trained_linear(dtype: str, *, rows: str = "token", gates: bool = False, narrow: bool = False) -> None:
    """parallel_linear, forward and backward."""
    tokens, slots, count, inputs, outputs = 1024, 4, 32, 1024, 512 if narrow else 2048
    kind = DTYPES[dtype]
    order = plan(empty(tokens, slots, dtype=torch.int64), count)
    x = empty(tokens if rows == "token" else tokens * slots, inputs, dtype=kind)
    gates_TK = empty(tokens, slots) if gates else None
    w, bias = empty(count, outputs, inputs, dtype=kind), empty(count, outputs, dtype=kind)
    _differentiated(_ParallelLinear, x, w, gates_TK, bias, order, rows, False)


def turned(dtype: str) -> None:
    rotate_heads(empty(2, 64, 2, 4, 2, 128, dtype=DTYPES[dtype]), empty(1, 64, 64))


class _Context(SimpleNamespace):
    """Autograd's engine wants real devices; its functions do not."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _differentiated(function: Any, *arguments: Any) -> None:
    context = _Context(needs_input_grad=[isinstance(each, Tensor) for each in arguments])
    function.backward(context, torch.empty_like(function.forward(context, *arguments)))


def unpacked(dtype: str, **kind: Any) -> None:
    dequantize_experts(packed(8, 2048, 1056, **kind), DTYPES[dtype])


def linear(dtype: str, rows: int, *, bias: bool = False, columns: int = 2048, **kind: Any) -> None:
    bias_O = empty(4096, dtype=DTYPES[dtype]) if bias else None
    quantised_linear(empty(rows, columns, dtype=DTYPES[dtype]), packed(1, 4096, columns, **kind), bias_O)


NORMED = (("fp16", 100), ("fp16", 4096), ("fp32", 100), ("bf16", 16_384), ("fp32", 16_384))
"""Rows that a norm takes alone: odd, and so long that the registers of a program are full."""
Calls = dict[str, Callable[[], object]]


def _experts(dtype: str, *rows: int, name: str = "", **options: Any) -> Calls:
    return {f"experts-{dtype}-{count}{name}": partial(experts, dtype, count, **options) for count in rows}


def _exchange(dtype: str, bucket: int, name: str = "", **options: Any) -> Calls:
    return {f"exchange-{dtype}-{bucket}{name}": partial(exchange, dtype, bucket, **options)}


def _decode(dtype: str, heads: int, kv_heads: int, size: int, name: str = "", **options: Any) -> Calls:
    return {f"decode-{dtype}-{heads}-{kv_heads}-{size}{name}": partial(decode, dtype, heads, kv_heads, size, **options)}


def _latents(dtype: str, heads: int, size: int, rank: int, name: str = "", **options: Any) -> Calls:
    return {f"latents-{dtype}-{heads}-{size}-{rank}{name}": partial(latents, dtype, heads, size, rank, **options)}


def _attention(dtype: str, heads: int, kv_heads: int, size: int, name: str = "", **options: Any) -> Calls:
    call = partial(attention, dtype, heads, kv_heads, size, **options)
    return {f"attention-{dtype}-{heads}-{kv_heads}-{size}{name}": call}


ATTENTION: Calls = {
    **_attention("bf16", 32, 4, 128),
    **_attention("bf16", 32, 4, 128, "-decodes", prompts=False),
    **_attention("bf16", 64, 8, 64, "-sinks", sinks=True, window=128),
    **_attention("bf16", 16, 8, 256, "-capped", softcap=50.0, window=4096),
    **_attention("fp16", 16, 4, 96, block=32),
    **_attention("fp16", 16, 16, 192, "-short", positions=256),
    **_attention("bf16", 71, 1, 64, "-decodes", prompts=False),
    **_attention("fp32", 32, 4, 128),
    **_attention("fp32", 8, 4, 64, "-decodes", prompts=False, block=64),
    **_attention("bf16", 32, 4, 128, "-trees", trees=True),
}
"""paged_attention, for heads of all sizes. A window is data: it makes no other code."""

SERVED: Calls = {
    **_experts("bf16", 1, 300, 4096),
    **_experts("bf16", 16, name="-local", local=True, ids=torch.int32),
    **_experts("fp16", 1, 16, 4096),
    **_experts("fp32", 1, 16, 512),
    "route-softmax": partial(router, 128, 8),
    "count": partial(count, 128, 64),
    **_decode("bf16", 32, 4, 128),
    **_decode("fp32", 8, 4, 32),
    **_latents("bf16", 128, 576, 512),
    **_latents("fp32", 16, 576, 512),
    **_attention("bf16", 32, 4, 128),
    **_attention("fp32", 32, 4, 128),
    **_attention("bf16", 32, 4, 128, "-uniform", uniform=True),
    **_attention("fp32", 4, 2, 64, "-uniform", uniform=True),
    **{f"invariant-experts-{dtype}": partial(invariant_experts, dtype) for dtype in ("bf16", "fp32")},
    **{f"invariant-linear-{dtype}": partial(invariant_linear, dtype, 2048, 5120) for dtype in ("bf16", "fp32")},
    **_exchange("bf16", 8, shared_gpu=True),
    **_exchange("fp32", 512, "-unsummed", unsummed=True),
    "combine-bf16": partial(sums, "bf16", 2048),
    "norm-bf16": partial(normed, "bf16", 2048),
    "norm-fp32-shared": partial(normed, "fp32", 2048, added=2),
    "qk-bf16-head": partial(projected, "bf16", 32, 4, 128),
    "qk-fp32-projection": partial(projected, "fp32", 16, 16, 128, norm="projection", kv=True),
}
"""Of each kernel that services launch about one variant per dtype: compiled at each commit, in a minute of CPU."""

MORE: Calls = {
    "invariant-experts-bf16-local": partial(invariant_experts, "bf16", local=True),
    "invariant-experts-bf16-wide": partial(invariant_experts, "bf16", shape=WIDE),
    "invariant-experts-bf16-odd": partial(invariant_experts, "bf16", shape=ODD),
    "invariant-experts-bf16-gpt-oss": partial(
        invariant_experts, "bf16", shape=GPT_OSS, bias=True, activation="swiglu_oai"
    ),
    "invariant-linear-bf16-odd": partial(invariant_linear, "bf16", 100, 36, bias=True),
    **_attention("bf16", 16, 16, 128, "-uniform", uniform=True),
    **_attention("bf16", 71, 1, 64, "-uniform", uniform=True),
    **_experts("bf16", 16, 64, 1024),
    **_experts("fp16", 300),
    **_experts("bf16", 300, 4096, name="-local", local=True, ids=torch.int32),
    **_experts("bf16", 1, 16, 512, name="-odd", shape=ODD),
    **_experts("fp32", 1, 16, 512, name="-odd", shape=ODD, bias=True),
    **_experts("bf16", 64, name="-planned", block_rows=128),
    **_experts("bf16", 64, name="-many-pairs", shape=TUNED | {"K": 32}),
    **_decode("fp16", 16, 16, 64),
    **_decode("bf16", 16, 4, 96, window=4096),
    **_decode("bf16", 32, 4, 128, "-blocks-of-5", block=5),
    **_decode("bf16", 32, 1, 256),
    **_decode("bf16", 64, 8, 64, "-sinks", sinks=True, window=128),
    **_decode("fp32", 64, 8, 64, "-sinks", sinks=True),
    **_decode("fp32", 32, 1, 256),
    **_latents("bf16", 16, 576, 512),
    **_latents("fp16", 64, 576, 512, "-blocks-of-5", block=5),
    **_latents("fp16", 6, 36, 26, "-odd"),
    **_exchange("fp16", 64),
    **_exchange("bf16", 512, members=8),
    **_exchange("bf16", 64, "-unsummed", unsummed=True),
    **_exchange("bf16", 64, "-odd", hidden=100),
    "route-choose-first": partial(router, 60, 4, order="choose_first", renormalise=True, keep=True),
    "route-groups": partial(router, 256, 8, bias=True, groups=8, top_groups=4, group_score="top2_sum"),
    "route-512": partial(router, 512, 16, score="sigmoid", bias=True),
    "combine-fp32-odd": partial(sums, "fp32", 100),
    **{f"norm-{dtype}-{hidden}": partial(normed, dtype, hidden, added=0) for dtype, hidden in NORMED},
    "qk-bf16-one": partial(projected, "bf16", 32, 4, 128, rows=1),
    "qk-bf16-plain": partial(projected, "bf16", 32, 8, 128, norm=None, kv=True),
    "qk-bf16-clipped": partial(projected, "bf16", 64, 8, 128, norm="projection", clip=8.0),
    "qk-fp16-odd": partial(projected, "fp16", 6, 2, 24, clip=8.0, kv=True),
    "qk-bf16-part": partial(projected, "bf16", 96, 8, 128, rotated=64),
    "qk-bf16-unrotated": partial(projected, "bf16", 64, 8, 128, rotated=0),
    "qk-fp16-odd-part": partial(projected, "fp16", 6, 2, 24, norm=None, rotated=10, kv=True),
    "qk-bf16-interleaved": partial(projected, "bf16", 20, 4, 128, norm=None, interleaved=True),
    **_experts("bf16", 1, 16, 512, name="-biases", bias=True, weights_on="input", activation="gelu"),
    **_experts("fp16", 16, 4096, name="-keep", bias=True, keep=True),
    **_experts("bf16", 1, 16, 4096, name="-int4", bits=4),
    **_experts("bf16", 1, 16, 4096, name="-int8", bits=8),
    **_experts("bf16", 1, 16, name="-int4-channel", bits=4, group=0),
    **_experts("bf16", 1, 16, name="-int8-channel", bits=8, group=0),
    **_experts("bf16", 1, name="-int4-wide", bits=4, shape=WIDE),
    **_experts("fp16", 1, 16, 4096, name="-int4", bits=4),
    **_experts("fp16", 16, 4096, name="-int8", bits=8),
    **_experts("fp32", 16, name="-int8", bits=8),
    **{
        f"experts-bf16-16{name}": partial(tiled, "small.down", tiles, partial(experts, "bf16", 16, bits=bits))
        for name, bits, tiles in (
            ("-summed-by-the-last", 16, {"COMBINE_LAUNCH": 0}),
            ("-int4-summed-by-the-last", 4, {"COMBINE_LAUNCH": 0}),
            ("-in-float32-parts", 16, {"SPLIT_K": 4, "PARTS_FP32": 1}),
        )
    },
    **{
        f"dequantize-{dtype}-int{bits}": partial(unpacked, dtype, bits=bits, group=group)
        for dtype, group in (("bf16", 128), ("fp32", 0))
        for bits in (4, 8)
    },
    "dequantize-bf16-mxfp4": partial(unpacked, "bf16", **MXFP4),
    "dequantize-fp16-fp8": partial(unpacked, "fp16", **FP8),
    **{
        f"linear-{dtype}-{rows}-{name}": partial(linear, dtype, rows, bias=rows > 1, **kind)
        for dtype, rows in (("bf16", 1), ("bf16", 32), ("fp16", 128))
        for name, kind in (("int4", {"bits": 4, "group": 128}), ("fp8", FP8), ("mxfp4", MXFP4))
    },
    "linear-bf16-64-int4-zeros": partial(linear, "bf16", 64, bits=4, group=32, zeros=True),
    "linear-bf16-8-int8-odd": partial(linear, "bf16", 8, columns=2000, bits=8, group=0),
    "linear-fp32-16-int8": partial(linear, "fp32", 16, bits=8, group=64),
    **_experts("bf16", 1, 16, 512, name="-mxfp4", kind=MXFP4, shape=GPT_OSS, bias=True, activation="swiglu_oai"),
    **_experts("bf16", 1, 16, 512, name="-fp8", kind=FP8),
    "experts-bf16-4096-rounded": partial(rounded_rows, "bf16", 4096),
    "experts-bf16-512-rounded": partial(rounded_rows, "bf16", 512, local=True),
    "experts-bf16-4096-rounded-wide": partial(rounded_rows, "bf16", 4096, shape=WIDE),
    "experts-fp16-4096-rounded-gpt-oss": partial(
        rounded_rows, "fp16", 4096, shape=GPT_OSS, scale_rows=64, bias=True, activation="swiglu_oai", weights_on="input"
    ),
    **_experts("bf16", 1, 16, name="-int4-zeros", kind={"bits": 4, "group": 128, "zeros": True}),
    **_experts("fp16", 1, 16, name="-int4-g32", kind={"bits": 4, "group": 32}),
    **{
        f"plan-{rows}-{first_come}": partial(planned, rows, capacity=16, first_come=first_come, keep=True, local=True)
        for rows, first_come in ((16, "token"), (512, "slot"), (4096, "token"))
    },
    "grouped-mlp": partial(grouped, "bf16", 512),
    **{f"trained-mlp-bf16-{each}": partial(trained_mlp, "bf16", each, bias=True) for each in get_args(Activation)},
    "trained-mlp-fp16-plain": partial(trained_mlp, "fp16", "swiglu", bias=False),
    "trained-mlp-fp32-odd": partial(trained_mlp, "fp32", "swiglu", bias=True, shape=ODD),
    "trained-linear-bf16": partial(trained_linear, "bf16", gates=True),
    "trained-linear-bf16-grouped": partial(trained_linear, "bf16", rows="grouped", gates=True, narrow=True),
    "trained-linear-fp16-pair": partial(trained_linear, "fp16", rows="pair"),
    "trained-linear-fp32": partial(trained_linear, "fp32", gates=True, narrow=True),
    **{name: call for name, call in ATTENTION.items() if name not in SERVED},
    "rotate-bf16": partial(turned, "bf16"),
    "rotate-fp32": partial(turned, "fp32"),
}
"""Other shapes, and what the library offers beyond what services launch."""

CALLS = SERVED | MORE
