"""Keys of draws: 64-bit words that name (seed, choice, position), defined in :mod:`services.attention.sampling.noise`.

No tensors; many positions at once as arrays, since a step draws for hundreds of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK64 = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(z: int) -> int:
    """SplitMix64's step: a bijection of 64-bit words without visible structure."""
    z = (z + _STEP) & _MASK64
    z = ((z ^ z >> 30) * _FIRST) & _MASK64
    z = ((z ^ z >> 27) * _SECOND) & _MASK64
    return z ^ z >> 31


def sequence_key(seed: int, choice: int) -> int:
    """What the keys of all draws of a sequence begin with. Any integers; they count modulo 2^64."""
    return mix64(mix64(seed & _MASK64) ^ choice & _MASK64)


def draw_key(seed: int, choice: int, position: int) -> int:
    """Key of one draw. Any integers; they count modulo 2^64."""
    return mix64(sequence_key(seed, choice) ^ position & _MASK64)


def draw_keys(sequence_keys: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Of each sequence at its position: ``mix64(sequence_key ^ position)``."""
    z = np.array(sequence_keys, dtype=np.uint64) ^ np.array(positions, dtype=np.uint64)
    z += np.uint64(_STEP)  # wraps, as unsigned arrays do
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    return z ^ z >> np.uint64(31)
