"""Hits at single positions in, how many tokens of a draft the target takes in a row out.

On the target's own greedy text this is what drafting would give: as long as a draft is right, it has written what the
text says, so at each depth it reads just what it reads there under teacher forcing. On any other text a right token is
not the next one, and runs mean nothing.

Legend: B rows, L positions, N positions with a label, W positions that a draft starts at, S speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

DEPTH: Final = 4
"""Tokens of a draft."""


def runs(found: Mapping[str, Tensor], known_BL: Tensor) -> dict[str, Tensor]:
    """int64 ``[W]`` by measure, each 0 to ``DEPTH``, of the ``hits`` at the N positions where ``known_BL`` is true.

    A draft starts wherever ``DEPTH`` positions with a label follow one another. A document's last position has none, so
    drafts stay within a document; its last ``DEPTH - 1`` labelled ones start no draft.

    ``one_each/k`` is the longest of k separate drafts, ``DEPTH`` tokens each. ``merged/k`` and ``first_alone/k`` choose
    among k tokens at each depth: what a tree of k + k^2 + ... + k^DEPTH nodes holds.

    Example: five labels, hits 1, 1, 0, 1, 1: drafts start at the first two positions, and the runs are 2 and 1.
    """
    starts_BW = known_BL.unfold(1, DEPTH, 1).all(2)
    lengths = {name: _in_a_row(hit_N, known_BL)[starts_BW] for name, hit_N in found.items()}
    alone_SW = torch.stack([length_W for name, length_W in lengths.items() if name.startswith("alone/")])
    longest_SW = alone_SW.cummax(0).values
    return lengths | {f"one_each/{count}": length_W for count, length_W in enumerate(longest_SW, start=1)}


def tree_nodes(branches: int) -> int:
    """Of a tree with so many branches at each depth. Example: ``tree_nodes(2) == 2 + 4 + 8 + 16``."""
    return sum(branches**depth for depth in range(1, DEPTH + 1))


def _in_a_row(hit_N: Tensor, known_BL: Tensor) -> Tensor:
    """int64 ``[B, L - DEPTH + 1]``."""
    hit_BL = torch.zeros_like(known_BL)
    hit_BL[known_BL] = hit_N
    return hit_BL.unfold(1, DEPTH, 1).long().cumprod(2).sum(2)
