"""Which layers of a checkpoint are quantised and how, as ``quantization_config`` in config.json says. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.model.quantised.stored import LinearFormat

Coverage = Literal["left", "quantised", "either", "outside"]
"""What config.json says of a layer: it is left as it is, it is quantised, the files decide, or no group has it."""
Match = Literal["names", "parts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers of one format. ``targets`` name them as ``Quantisation.left`` does; ``others`` is what becomes of layers
    that no target of any group names."""

    format: LinearFormat
    targets: tuple[str, ...] = ("Linear",)
    others: Coverage = "outside"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """``left`` names layers that stay as they are. Of several groups that name a layer the first has it.

    With ``match`` "names" a name is a whole name, "Linear" is every linear layer, and "re:" introduces a pattern from a
    name's start. With "parts" it is a name's beginning up to a dot, a pattern of one, or a name's end. ``heads`` says
    that the output head is quantised, which else it need not be.
    """

    method: str
    groups: tuple[Group, ...]
    left: tuple[str, ...] = ()
    match: Match = "names"
    heads: bool = False


class Choice:
    """Decides for each layer what config.json says of it. Built once for many layers: lists may be long."""

    def __init__(self, quantisation: Quantisation) -> None:
        self._quantisation = quantisation
        self._left = Names(quantisation.left, quantisation.match)
        self._targets = [(group, Names(group.targets, "names")) for group in quantisation.groups]

    def of(self, names: Sequence[str], *, free: bool) -> tuple[Coverage, LinearFormat]:
        """Return what is said of the layer that has ``names``, and the format that it has if it is quantised.

        Args:
            free: the layer is of a kind that tools leave out without saying so: a router or an output head.
        """
        found = (group.format for group, targets in self._targets if any(name in targets for name in names))
        scheme, last = next(found, None), self._quantisation.groups[-1]
        if any(name in self._left for name in names):
            return "left", scheme or last.format
        if scheme is None:
            return last.others, last.format
        loose = self._quantisation.match == "parts" and all(map(self._left.loosely, names))
        return "either" if free or loose else "quantised", scheme


class Names:
    """A list of names from config.json. ``in`` says whether one of them names a module.

    Raises (constructor):
        re.error: a pattern is none.
    """

    def __init__(self, names: tuple[str, ...], match: Match) -> None:
        self._match = match
        patterns = [name for name in names if _is_pattern(name, match)]
        self._whole = {name.rstrip(".") for name in names} - set(patterns)
        short = (name for name in self._whole if not name.startswith("model."))  # whole paths end no longer one
        self._ends = tuple(short) if match == "parts" else ()
        self._patterns = [compiled(name, match) for name in patterns]

    def __contains__(self, module: str) -> bool:
        if module in self._whole or ("Linear" in self._whole and self._match == "names"):
            return True
        if self._match == "parts" and (module.endswith(self._ends) or not self._whole.isdisjoint(prefixes(module))):
            return True
        return any(pattern.match(module) for pattern in self._patterns)

    def loosely(self, module: str) -> bool:
        """Return whether a name is somewhere in ``module``, which AutoAWQ takes for enough and others do not."""
        return any(end in module for end in self._ends)


def compiled(name: str, match: Match) -> re.Pattern[str]:
    pattern = name.removeprefix("re:")
    return re.compile(pattern if match == "names" else rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")


def prefixes(module: str) -> list[str]:
    """Return the names of all modules around ``module``, and its own."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_pattern(name: str, match: Match) -> bool:
    return name.startswith("re:") or (match == "parts" and bool(re.search(r"[*+?\[\](){}|^$\\]", name)))
