"""Counter-based Gumbel noise: the randomness of every draw, as a pure function of (seed, choice, position, token).

``argmax_v(logit_v / temperature + noise_v)`` is a draw from the softmax (Gumbel-max). Because the noise has no state,
a draw does not depend on what else is in the batch, and a replay after a preemption, a lost attempt or a verified
speculation draws the same token again. ``position`` is the token's absolute index in prompt + generated tokens.

Definition. All arithmetic on unsigned integers, modulo 2^64 for the key and 2^32 for the words; ``>>`` is logical.

    mix(z):   z += 0x9E3779B97F4A7C15;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9          (SplitMix64)
              z = (z ^ z >> 27) * 0x94D049BB133111EB;  return z ^ z >> 31
    key       = mix(mix(mix(seed) ^ choice) ^ position);  low, high = its lower and upper 32 bits
    word(v):  x = (v * 0x9E3779B1) ^ low;  x = (x ^ x >> 16) * 0x7FEB352D + high
              x = (x ^ x >> 15) * 0x846CA68B;  return x ^ x >> 16
    u(v)      = min(((word(v) >> 1) + 0.5) * 2^-31, 1 - 2^-24)                           in float32
    noise(v)  = -ln(-log1p(-u(v)))                                                      in float32

The exponential ``-log1p(-u)`` that wins a draw is a small one, and small ``u`` keep their relative precision in
float32; with ``-ln(u)`` it would be the ``u`` near 1, which do not. Noise lies in [-2.82, 22.19].

Example: seed 7, choice 0, position 3 give the key 0x199EC517D2809B60; token 5 gets the word 0xEEB8C333 and the
noise -0.991668.

Legend: R rows (draws), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.model.transfer import upload

_CHUNK_ELEMENTS = 1 << 18
"""Words in one piece of rows on a CPU, so that all passes over a piece stay in a core's cache."""


class GumbelNoise:
    """Noise over a vocabulary. Holds only the tokens' fixed multiples, [V] int32."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        tokens_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
        self._tokens_V = _as_int32(tokens_V * 0x9E3779B1)

    def rows(self, keys: Sequence[int] | NDArray[np.uint64]) -> Tensor:
        """Return the noise of every token for each key: [R, V] float32."""
        device = self._tokens_V.device
        words_R2 = np.array(keys, dtype="<u8").view("<i4").reshape(-1, 2)  # lower half first
        out_RV = torch.empty((len(keys), self._tokens_V.numel()), dtype=torch.float32, device=device)
        low_R1, high_R1 = upload(words_R2, device).split_with_sizes((1, 1), dim=1)
        step = max(1, _CHUNK_ELEMENTS // self._tokens_V.numel()) if device.type == "cpu" else max(1, len(keys))
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            _gumbel(_words(self._tokens_V, low_R1[part], high_R1[part]), out_RV[part])
        return out_RV


def _words(tokens_V: Tensor, low_R1: Tensor, high_R1: Tensor) -> Tensor:
    """Return ``word(v)`` as int32 bit patterns: products and sums wrap, only shifts differ from unsigned words."""
    x_RV = torch.bitwise_xor(tokens_V, low_R1)
    shifted_RV = torch.empty_like(x_RV)
    _xor_shift(x_RV, 16, shifted_RV).mul_(0x7FEB352D).add_(high_R1)
    _xor_shift(x_RV, 15, shifted_RV).mul_(0x846CA68B - 2**32)
    return _xor_shift(x_RV, 16, shifted_RV)


def _xor_shift(x: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """Compute ``x ^= x >> bits`` in place. torch shifts int32 arithmetically; the mask makes the shift logical."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << 32 - bits) - 1))


def _gumbel(words: Tensor, out: Tensor) -> None:
    words.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    out.copy_(words).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    out.neg_().log1p_().neg_().log_().neg_()


def _as_int32(words: Tensor) -> Tensor:
    """Return the lower 32 bits of int64 words, as the int32 with the same bits."""
    low = words & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
