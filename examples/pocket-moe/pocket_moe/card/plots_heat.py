"""Expert counts by domain and layer in, the picture of who works for whom out.

Legend: D domains, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pocket_moe.card.plots import Picture

_CELL, _GAP, _LEFT, _TOP = 13, 18, 96, 64
_STRONGEST = 4.0
"""Times the even share at which a cell has its full colour."""


def heat_map(load: Mapping[str, Any]) -> str:
    """Small multiples by layer, a domain a row, an expert a column; orange where an expert works for the domain more
    than its even share, blue where less. Columns stand by the domain that the expert works for most."""
    share_DLE = loads(load)
    order = domain_order(share_DLE)
    share_DLE, names = share_DLE[order], [load["domains"][index] for index in order]
    domains, layers, experts = share_DLE.shape
    panel = _panel_width(share_DLE)
    picture = Picture(_LEFT + layers * panel, _TOP + domains * _CELL + 60, "Experts by domain, layer by layer")
    picture.text(_LEFT, 18, "Which experts each domain uses, layer by layer", size=15)
    picture.text(_LEFT, 36, f"{experts} experts a layer, sorted by the domain they serve most", style="mild")
    for row, name in enumerate(names):
        picture.text(_LEFT - 6, _TOP + row * _CELL + 10, name, size=10, anchor="end")
    for layer in range(layers):
        left, right = _LEFT + layer * panel, _LEFT + layer * panel + experts * _CELL
        picture.text(left, _TOP - 8, f"layer {layer}", size=10, style="mild")
        picture.text((left + right) / 2, _TOP + domains * _CELL + 12, "expert", size=10, anchor="middle", style="mild")
    for (style, opacity), corners in sorted(_cells(share_DLE).items()):
        picture.squares(corners, _CELL - 1, style=style, opacity=opacity)
    _key(picture, _TOP + domains * _CELL + 32)
    return picture.svg()


def loads(load: Mapping[str, Any]) -> NDArray[np.float64]:
    """``[D, L, E]``: an expert's share of a domain's choices, 1 where experts share evenly."""
    counts_DLE = np.array([load["counts"][name] for name in load["domains"]], np.float64)
    mean_DL1 = counts_DLE.mean(2, keepdims=True)
    return np.where(mean_DL1 > 0, counts_DLE / np.maximum(mean_DL1, 1e-9), 1.0)


def domain_order(share_DLE: NDArray[np.float64]) -> list[int]:
    """The first domain, then always the most similar of those left: neighbours look alike."""
    flat = np.log2(np.maximum(share_DLE, 1 / _STRONGEST**2)).reshape(len(share_DLE), -1)
    order, left = [0], set(range(1, len(flat)))
    while left:
        order.append(min(sorted(left), key=lambda index: float(np.abs(flat[index] - flat[order[-1]]).sum())))
        left.remove(order[-1])
    return order


def expert_order(share_DE: NDArray[np.float64]) -> list[int]:
    """Experts by the row of the domain that they serve most, the most devoted first."""
    best_E = share_DE.argmax(0).tolist()
    return sorted(
        range(share_DE.shape[1]), key=lambda expert: (best_E[expert], -float(share_DE[:, expert].max()), expert)
    )


def _cells(
    share_DLE: NDArray[np.float64],
) -> dict[tuple[str, float], list[tuple[int, int]]]:
    """Corners of the cells by colour and strength."""
    cells: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for layer in range(share_DLE.shape[1]):
        for column, expert in enumerate(expert_order(share_DLE[:, layer])):
            x = _LEFT + layer * _panel_width(share_DLE) + column * _CELL
            for row, share in enumerate(share_DLE[:, layer, expert].tolist()):
                cells.setdefault(_shade(share), []).append((x, _TOP + row * _CELL))
    return cells


def _panel_width(share_DLE: NDArray[np.float64]) -> int:
    experts: int = share_DLE.shape[2]
    return experts * _CELL + _GAP


def _shade(share: float) -> tuple[str, float]:
    """Colour, and strength in steps of a twentieth; being left out is less remarkable than being sought."""
    strength = min(1.0, abs(math.log(max(share, 1e-6))) / math.log(_STRONGEST))
    style, opacity = ("a", strength) if share >= 1 else ("b", 0.5 * strength)
    return style, max(0.05, round(opacity * 20) / 20)


def _key(picture: Picture, y: int) -> None:
    for index, share in enumerate((0.25, 0.5, 1.0, 2.0, 4.0)):
        x, (style, opacity) = _LEFT + index * 62, _shade(share)
        picture.squares([(x, y)], _CELL - 1, style=style, opacity=opacity)
        picture.text(x + _CELL + 4, y + 10, f"{share:g}x", size=10, style="mild")
    picture.text(_LEFT + 5 * 62, y + 10, "the even share of a domain's choices", size=10, style="mild")
