"""The style that all pictures share: a function that draws a figure in, SVG text out.

The same data gives the same bytes: no date, no random names, fonts' measures from matplotlib's own file, coordinates to
a hundredth of a point. Colours follow Okabe and Ito, for colour-blind readers; a page in dark mode gets lighter ones.
Text stays text. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, ParamSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

INSTALL: Final = "Pictures are drawn with matplotlib: pip install -e '.[plots]' in the clone."

INK, MILD, RULE, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#b6498a"
SERIES: Final = (BLUE, ORANGE, GREEN, PINK)
_IN_THE_DARK: Final[Mapping[str, str]] = {
    INK: "#e6edf3",
    MILD: "#9198a1",
    RULE: "#3d444d",
    PAPER: "#0d1117",
    BLUE: "#56b4e9",
    ORANGE: "#ff8f4d",
    GREEN: "#3fce9f",
    PINK: "#ea9cc9",
}

_STYLE: Final[Any] = {  # matplotlib types each key
    "svg.fonttype": "none",
    "svg.hashsalt": "expertmesh",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "figure.titlesize": 12,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": MILD,
    "axes.labelsize": 9,
    "axes.prop_cycle": f"cycler(color={list(SERIES)})",
    "text.color": INK,
    "axes.labelcolor": MILD,
    "xtick.labelcolor": MILD,
    "ytick.labelcolor": MILD,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": RULE,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}

_ATTRIBUTE: Final = re.compile(r'="[^"]*"')
_LONG: Final = re.compile(r"-?\d+\.\d{3,}")


def missing() -> str:
    """What to install before anything can be drawn, in one sentence; empty if all is there."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return INSTALL
    return ""


def picture(draw: Callable[P, Figure]) -> Callable[P, str]:
    """Let ``draw``, which returns a figure, return SVG in this module's style. The result raises ModuleNotFoundError
    where matplotlib is missing."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        if sentence := missing():
            raise ModuleNotFoundError(sentence)
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # whatever a user's matplotlibrc says
            matplotlib.rcParams.update(_STYLE)
            return _svg(draw(*args, **kwargs))

    return drawn


def figure(width: float, height: float, title: str) -> Figure:
    """A figure of so many inches, with its title and nothing else. What does not fit makes the plots smaller."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(title, x=0.01, horizontalalignment="left")
    return made


def _svg(drawn: Figure) -> str:
    text = io.StringIO()
    drawn.savefig(text, format="svg", metadata={"Title": drawn.get_suptitle(), "Date": None, "Creator": None})
    short = _ATTRIBUTE.sub(lambda value: _LONG.sub(_hundredths, " ".join(value[0].split())), text.getvalue())
    lines = (line.rstrip() for line in short.replace("</style>", _dark() + "</style>", 1).splitlines())
    return "\n".join([*lines, ""])


def _hundredths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _dark() -> str:
    rules = (
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important; }}'
        for light, dark in _IN_THE_DARK.items()
        for kind in ("fill", "stroke")
    )
    return "\n".join(["\n@media (prefers-color-scheme: dark) {", *rules, "}\n"])
