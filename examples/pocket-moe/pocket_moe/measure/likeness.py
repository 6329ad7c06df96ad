"""Expert shares by domain in, how alike the domains' choices are out.

Legend: D domains, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ALIKE: Final = 0.15
"""Domains whose choices differ by less, on average, are one group."""


def distances(share_DLE: Floats) -> Floats:
    """``[D, D]``: the share of one domain's choices that would have to go to other experts to be spread as another's,
    as a mean over layers (total variation); 0 if they are alike, 1 if they share no expert.

    Example: one layer, shares 1, 0 and 0.5, 0.5 of two domains: 0.5.
    """
    spread_DLE = share_DLE / np.maximum(share_DLE.sum(2, keepdims=True), 1e-9)
    apart_DDLE = np.abs(spread_DLE[:, None] - spread_DLE[None])
    return np.asarray(apart_DDLE.sum(3).mean(2) / 2, np.float64)


def groups(apart_DD: Floats, most: float = ALIKE) -> list[list[int]]:
    """Domains joined, the most alike first, while groups are at most ``most`` apart on average; the largest first."""
    found = [[index] for index in range(len(apart_DD))]
    while len(found) > 1:
        pairs = [(between(apart_DD, a, b), i, j) for j, b in enumerate(found) for i, a in enumerate(found[:j])]
        apart, i, j = min(pairs)
        if apart > most:
            break
        found[i] += found.pop(j)
    return sorted((sorted(group) for group in found), key=lambda group: (-len(group), group))


def between(apart_DD: Floats, a: Sequence[int], b: Sequence[int]) -> float:
    """The mean distance of a domain of ``a`` to one of ``b``; with itself none is compared, alone it is 0."""
    pairs = [float(apart_DD[i, j]) for i in a for j in b if i != j]
    return sum(pairs) / max(1, len(pairs))
