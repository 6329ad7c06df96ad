"""Expert counts by domain and layer in, the picture of who works for whom out.

Legend: D domains, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.pictures import BLUE, INK, ORANGE, figure, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STRONGEST = 4.0
"""Times the even share at which a cell has its full colour."""
_KEY = (0.25, 0.5, 1.0, 2.0, 4.0)


@picture
def heat_map(load: Mapping[str, Any]) -> Figure:
    """Small multiples by layer, a domain a row, an expert a column; orange where an expert works for the domain more
    than its even share, blue where less. Columns stand by the domain that the expert works for most."""
    share_DLE = loads(load)
    order = domain_order(share_DLE)
    share_DLE, names = share_DLE[order], [load["domains"][index] for index in order]
    domains, layers, experts = share_DLE.shape
    drawn = figure(1 + 0.13 * layers * experts, 1.7 + 0.17 * domains, "Which experts each domain uses, layer by layer")
    (plots,) = drawn.subplots(1, layers, sharey=True, squeeze=False)
    for layer, axes in enumerate(plots):
        share_DE = share_DLE[:, layer]
        _cells(axes, share_DE[:, expert_order(share_DE)])
        axes.set_title(f"layer {layer}")
        axes.set_xlabel("expert")
    plots[0].set_yticks(np.arange(domains) + 0.5, names, color=INK)
    plots[0].set_ylim(domains, 0)
    shown = "shares of a domain's choices, 1x where its experts share evenly"
    _key(drawn, f"{shown}; {experts} experts a layer, sorted by the domain they serve most")
    return drawn


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


def _cells(axes: Axes, share_DE: NDArray[np.float64]) -> None:
    """Those of one colour as one shape, which takes a third of the bytes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    cells: dict[tuple[float, ...], list[Path]] = {}
    for (row, column), share in np.ndenumerate(share_DE):
        right, bottom = column + 0.92, row + 0.92
        corners = [(column, row), (right, row), (right, bottom), (column, bottom), (column, row)]
        cells.setdefault(_shade(float(share)), []).append(Path(corners, closed=True))
    for colour, paths in sorted(cells.items()):
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), color=colour, linewidth=0))
    axes.set_xlim(0, share_DE.shape[1])
    axes.set_xticks([])
    axes.grid(visible=False)


def _shade(share: float) -> tuple[float, float, float, float]:
    """Colour, stronger in steps of a twentieth; being left out is less remarkable than being sought."""
    from matplotlib.colors import to_rgba

    strength = min(1.0, abs(math.log(max(share, 1e-6))) / math.log(_STRONGEST))
    colour, opacity = (ORANGE, strength) if share >= 1 else (BLUE, 0.6 * strength)
    return to_rgba(colour, max(0.05, round(opacity * 20) / 20))


def _key(drawn: Figure, title: str) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_shade(share), label=f"{share:g}x") for share in _KEY]
    drawn.legend(handles=handles, loc="outside lower left", ncols=len(_KEY), title=title, alignment="left")
