"""Attention of a step over a paged KV cache: decodes, prompts, and both, beside torch's over keys that lie in a row.

torch's call per sequence (one for all decodes, which are equally long here) reads no block table and needs none: what
gathering the keys would cost is left out. ``paged_decode`` is our kernel for one row per sequence.
Legend: as in :mod:`bench.attention_case`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.attention_case import AttentionCase, Heads, Lengths
from bench.measuring import Settings, release
from bench.providers.base import Unsupported
from bench.results import Row
from bench.suites.checked import checked
from bench.timing import Call
from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_decode.op import paged_decode

SHAPES: Final = (
    Heads(name="qwen3-30b", heads=32, kv_heads=4, head_dim=128),
    Heads(name="olmoe", heads=16, kv_heads=16, head_dim=128),
    Heads(name="gpt-oss", heads=64, kv_heads=8, head_dim=64),
)
BATCHES: Final = (1, 8, 64, 256, 512)
CONTEXTS: Final = (512, 2048, 8192, 32_768)
MAX_POSITIONS: Final = 1 << 20
"""Of a batch of decodes: 2 GB of Qwen3-30B's keys and values in a layer."""
PROMPTS: Final = (2048, 8192, 32_768)
MIXED: Final = (256, 2048, 4, 512, 4096)
"""Decodes, their context, chunks of prompts, their rows, and the context with these."""
Function = Callable[[AttentionCase], Call]


def attention(settings: Settings) -> Iterator[Row]:
    """``--scale`` divides contexts and rows of prompts. ``--tokens``: at most so many decodes, and rows of a prompt."""
    for shape in SHAPES:
        for name, lengths in steps(settings).items():
            yield from _measure(shape, name, lengths, settings)


def steps(settings: Settings) -> dict[str, Lengths]:
    """By name: what is done, and the context. Each once, whatever they were reduced to."""
    most, scale = settings.tokens or max(BATCHES), settings.scale
    found: dict[str, Lengths] = {}
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch <= most and batch * context <= MAX_POSITIONS:
                length = max(1, context // scale)
                found[f"decode context {length} batch {batch}"] = Lengths(rows=(1,) * batch, kv_len=(length,) * batch)
    for prompt in PROMPTS:
        rows = max(2, min(prompt // scale, settings.tokens or prompt))
        found[f"prompt context {rows}"] = Lengths(rows=(rows,), kv_len=(rows,))
    decodes, context, chunks, rows, end = MIXED
    decodes, rows = min(decodes, most), max(2, min(rows // scale, most))
    context, end = max(1, context // scale), end // scale
    found[f"mix context {end}"] = Lengths(
        rows=(1,) * decodes + (rows,) * chunks, kv_len=(context,) * decodes + (max(rows, end),) * chunks
    )
    return found


def _measure(shape: Heads, name: str, lengths: Lengths, settings: Settings) -> Iterator[Row]:
    dtype = "bf16" if settings.on_gpu else "fp32"
    case = AttentionCase(shape, lengths, dtype, settings.device, seed=settings.seed)
    kind, _, context = name.partition(" ")
    for provider, build in PROVIDERS.items():
        row = Row(
            suite=settings.suite, op=f"attention.{kind}", provider=provider,
            shape=f"{shape.name} {context.partition(' batch')[0]}", rows=lengths.total, dtype=dtype,
            floor_us=case.floor_us,
        )  # fmt: skip
        yield checked(case, build, row, settings)
    del case
    release(settings)


def _ours(case: AttentionCase) -> Call:
    return lambda number: paged_attention(
        case.q_TNH, case.k_PBJH, case.v_PBJH, case.tables[number % case.copies], case.work
    )


def _paged_decode(case: AttentionCase) -> Call:
    if max(case.lengths.rows) > 1:
        raise Unsupported("one row per sequence")
    kv_len_S = torch.tensor(case.lengths.kv_len, dtype=torch.int32, device=case.device)
    return lambda number: paged_decode(
        case.q_TNH, case.k_PBJH, case.v_PBJH, case.tables[number % case.copies], kv_len_S
    )


def _sdpa(case: AttentionCase) -> Call:
    """Keys of copy 0 alone, and views of the whole cache for the others: what lies there is as random."""
    pieces = list(_pieces(case))

    def call(number: int) -> Tensor:
        return torch.cat([piece(number) for piece in pieces])

    return call if len(pieces) > 1 else pieces[0]


def _pieces(case: AttentionCase) -> Iterator[Callable[[int], Tensor]]:
    """A call for all decodes, then one for each prompt."""
    decodes = sum(rows == 1 for rows in case.lengths.rows)
    if decodes:
        yield partial(_attend, case.q_TNH[:decodes].unsqueeze(2), _rotated(case, range(decodes)), None)
    first = decodes
    for sequence in range(decodes, len(case.lengths.rows)):
        rows, length = case.lengths.rows[sequence], case.lengths.kv_len[sequence]
        q_1NRH = case.q_TNH[first : first + rows].transpose(0, 1).unsqueeze(0)
        yield partial(_attend, q_1NRH, _rotated(case, range(sequence, sequence + 1)), (rows, length))
        first += rows


def _attend(q: Tensor, copies: list[tuple[Tensor, Tensor]], sizes: tuple[int, int] | None, number: int) -> Tensor:
    """``[rows, N, H]``. ``sizes``: of a prompt, whose rows see up to their own position."""
    k, v = copies[number % len(copies)]
    gqa = q.shape[1] != k.shape[1]
    if sizes is None:
        return scaled_dot_product_attention(q, k, v, enable_gqa=gqa).squeeze(2)
    if sizes[0] == sizes[1]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(*sizes), enable_gqa=gqa)
    return out[0].transpose(0, 1)


def _rotated(case: AttentionCase, sequences: range) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[S, J, L, H]`` in a row, of each copy; the others than the first have other memory."""
    k, v = zip(*(case.contiguous(sequence) for sequence in sequences), strict=True)
    pair = torch.stack(k).transpose(1, 2).contiguous(), torch.stack(v).transpose(1, 2).contiguous()
    return [pair, *((pair[0].clone(), pair[1].clone()) for _ in range(1, case.copies))]


PROVIDERS: Final[dict[str, Function]] = {"ours": _ours, "paged_decode": _paged_decode, "sdpa": _sdpa}
