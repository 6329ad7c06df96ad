"""Decodes over latents, with DeepSeek-V3's heads, Kimi-K2's and an eighth of V3's, beside torch's attention over
latents that lie in a row.

A latent of 576 numbers is read once for all heads: with few of them reading decides, with 128 products do. Each row's
bytes per second are its positions x 1,152 over its time in bfloat16; FlashMLA's figures are of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.latent_case import LatentCase, Latents
from bench.measuring import Settings, release
from bench.results import Row
from bench.suites.checked import checked
from bench.timing import Call

SHAPES: Final = (
    Latents(name="deepseek-v3", heads=128),
    Latents(name="kimi-k2", heads=64),
    Latents(name="an-eighth", heads=16),
)
BATCHES: Final = (1, 8, 64, 128, 256)
CONTEXTS: Final = (512, 4096, 8192, 32_768)
MAX_POSITIONS: Final = 1 << 21
"""Of a batch: 2.4 GB of latents."""
Function = Callable[[LatentCase], Call]


def latents(settings: Settings) -> Iterator[Row]:
    """``--scale`` divides contexts. ``--tokens``: at most so many rows."""
    most = settings.tokens or max(BATCHES)
    contexts = dict.fromkeys(max(1, context // settings.scale) for context in CONTEXTS)
    for shape in SHAPES:
        for context in contexts:
            for batch in BATCHES:
                if batch <= most and batch * context <= MAX_POSITIONS:
                    yield from _measure(shape, (context,) * batch, settings)


def _measure(shape: Latents, lengths: tuple[int, ...], settings: Settings) -> Iterator[Row]:
    dtype = "bf16" if settings.on_gpu else "fp32"
    case = LatentCase(shape, lengths, dtype, settings.device, seed=settings.seed)
    for provider, build in PROVIDERS.items():
        row = Row(
            suite=settings.suite, op="latents.decode", provider=provider, shape=f"{shape.name} context {lengths[0]}",
            rows=len(lengths), dtype=dtype, floor_us=case.floor_us,
        )  # fmt: skip
        yield checked(case, build, row, settings)
    del case
    release(settings)


def _ours(case: LatentCase) -> Call:
    return case


def _sdpa(case: LatentCase) -> Call:
    """All heads are rows of one product. Latents of copy 0 alone are those of the case."""
    first_S1LZ = torch.stack([case.contiguous(row) for row in range(len(case.lengths))]).unsqueeze(1)
    copies = [first_S1LZ, *(first_S1LZ.clone() for _ in range(1, case.copies))]
    q_S1NZ, rank, scale = case.q_SNZ.unsqueeze(1), case.shape.rank, case.shape.size**-0.5

    def call(number: int) -> Tensor:
        k_S1LZ = copies[number % case.copies]
        return scaled_dot_product_attention(q_S1NZ, k_S1LZ, k_S1LZ[..., :rank], scale=scale).squeeze(1)

    return call


PROVIDERS: Final[dict[str, Function]] = {"ours": _ours, "sdpa": _sdpa}
