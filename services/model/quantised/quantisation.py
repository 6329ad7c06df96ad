"""Which layers of a checkpoint are quantised and how, as ``quantization_config`` in config.json says. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.model.quantised.patterns import Budget, Pattern, only_name
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
    """Decides for each layer what config.json says of it. Built once for many layers: lists may be long.

    Raises (constructor):
        re.error: a pattern is none.
    """

    def __init__(self, quantisation: Quantisation) -> None:
        self._quantisation, budget = quantisation, Budget()
        self._left = Names(quantisation.left, quantisation.match, budget)
        self._targets = _Targets(quantisation.groups, budget)

    def of(self, names: Sequence[str], *, free: bool, fused: Sequence[str] = ()) -> tuple[Coverage, LinearFormat]:
        """Return what is said of the layer that has ``names``, and the format that it has if it is quantised.

        Args:
            free: the layer is of a kind that tools leave out without saying so: a router or an output head.
            fused: names that the layer has together with others where they are computed as one, as vLLM does. A list
                that has such a name means all of them; what a pattern means that fits no other name the files say.

        Raises:
            PatternCostly: patterns take too long to match.
        """
        scheme, last = self._targets.first(names) or self._targets.first(fused), self._quantisation.groups[-1]
        whole = self._quantisation.match == "names" and any(map(self._left.lists, fused))
        if whole or any(name in self._left for name in names):
            return "left", scheme or last.format
        if scheme is None:
            return last.others, last.format
        loose = self._quantisation.match == "parts" and all(map(self._left.loosely, names))
        loose = loose or any(name in self._left for name in fused)
        return "either" if free or loose else "quantised", scheme


class _Targets:
    """Finds the first group that has a layer."""

    def __init__(self, groups: Sequence[Group], budget: Budget) -> None:
        self._groups = groups
        self._patterns: list[tuple[int, Pattern]] = []
        self._by_name: dict[str, int] = {}
        self._every = len(groups)
        for at, group in enumerate(groups):
            for target in group.targets:
                is_pattern = target.startswith("re:")
                name = only_name(target[3:]) if is_pattern else target.rstrip(".")
                if name is None:
                    self._patterns.append((at, compiled(target, "names", budget)))
                else:
                    self._by_name.setdefault(name, at)
            if "Linear" in group.targets:
                self._every = min(self._every, at)

    def first(self, names: Sequence[str]) -> LinearFormat | None:
        """Raises PatternCostly."""
        found = min([self._every, *(self._by_name[name] for name in names if name in self._by_name)])
        for at, pattern in self._patterns:
            if at >= found:
                break
            if any(map(pattern.matches, names)):
                found = at
        return self._groups[found].format if found < len(self._groups) else None


class Names:
    """A list of names from config.json. ``in`` says whether one of them names a module.

    Raises (constructor):
        re.error: a pattern is none.
    """

    def __init__(self, names: Sequence[str], match: Match, budget: Budget) -> None:
        self._match = match
        patterns = [name for name in names if _is_pattern(name, match)]
        self._whole = {name.rstrip(".") for name in names} - set(patterns)
        short = (name for name in self._whole if not name.startswith("model."))  # whole paths end no longer one
        self._ends = tuple(short) if match == "parts" else ()
        only = {name: only_name(name.removeprefix("re:")) for name in patterns}
        self._only = set(only.values())
        self._patterns = [compiled(name, match, budget) for name in patterns if only[name] is None]

    def __contains__(self, module: str) -> bool:
        """Raises PatternCostly."""
        if module in self._whole or module in self._only or ("Linear" in self._whole and self._match == "names"):
            return True
        if self._match == "parts" and (module.endswith(self._ends) or not self._whole.isdisjoint(prefixes(module))):
            return True
        return any(pattern.matches(module) for pattern in self._patterns)

    def lists(self, module: str) -> bool:
        """Return whether the whole name is in the list."""
        return module in self._whole

    def loosely(self, module: str) -> bool:
        """Return whether a name is somewhere in ``module``, which AutoAWQ takes for enough and others do not."""
        return any(end in module for end in self._ends)


def compiled(name: str, match: Match, budget: Budget) -> Pattern:
    """Raises re.error."""
    pattern = name.removeprefix("re:")
    if match == "names":
        return Pattern(pattern, budget)
    re.compile(pattern)
    return Pattern(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", budget)


def prefixes(module: str) -> list[str]:
    """Return the names of all modules around ``module``, and its own."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_pattern(name: str, match: Match) -> bool:
    return name.startswith("re:") or (match == "parts" and bool(re.search(r"[*+?\[\](){}|^$\\]", name)))
