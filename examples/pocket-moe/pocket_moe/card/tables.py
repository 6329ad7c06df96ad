"""Records in, rows of the card's tables out: text cells, the header first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pocket_moe.card.facts import Training
from pocket_moe.card.markdown import one_line, shortened
from pocket_moe.card.plots_heat import loads
from pocket_moe.measure.likeness import between, distances, groups
from pocket_moe.measure.measure import ALL
from pocket_moe.measure.samples import Sample

_MEASURES: Final = {
    "alone": "speculator {}",
    "one_each": "one each, {}",
    "merged": "merged, {}",
    "first_alone": "first alone, {}",
}
_SHOWN: Final = 60
"""Letters of a sample."""
_SAME_AS_ALONE: Final = ("one_each/1", "merged/1", "first_alone/1")


def run_rows(runs: Mapping[str, Training]) -> list[list[str]]:
    rows = [["", "steps", "tokens", "peak rate", "last rate", "tokens/s", "minutes", "training loss", "held-out loss"]]
    for name, run in runs.items():
        size = [f"{run.steps:,}", f"{run.tokens / 1e6:,.0f} M", f"{run.peak_rate:.1e}", f"{run.last_rate:.1e}"]
        speed = [f"{run.tokens_per_second:,.0f}", f"{run.minutes:.1f}"]
        rows.append([name, *size, *speed, f"{run.loss:.3f}", f"{run.heldout:.3f}"])
    return rows


def tried_rows(tried: Mapping[str, Any]) -> list[list[str]]:
    """The runs that a recipe was chosen from, by kind."""
    columns = ("dictionary", "steps", "decay", "dropout", "weight_decay")
    rows = [
        [kind, *(f"{run[column]:,}" for column in columns), f"{run['heldout']:.3f}"]
        for kind, runs in tried.items()
        for run in sorted(runs, key=lambda run: float(run["heldout"]))
    ]
    return [["", "dictionary", "steps", "share with falling rate", "dropout", "weight decay", "held-out loss"], *rows]


def likeness(load: Mapping[str, Any]) -> tuple[NDArray[np.float64], list[list[int]]]:
    """``[D, D]``: how far apart the domains are; and their groups, the largest first."""
    apart_DD = distances(loads(load))
    return apart_DD, groups(apart_DD)


def likeness_rows(load: Mapping[str, Any]) -> list[list[str]]:
    """Groups of domains that choose alike, and how far apart they are; within a group between two of its domains."""
    apart_DD, found = likeness(load)
    names = [", ".join(load["domains"][index] for index in group) for group in found]
    keys = [chr(ord("A") + index) for index in range(len(found))]
    rows = [
        [key, name, *(f"{between(apart_DD, a, b):.2f}" for b in found)]
        for key, name, a in zip(keys, names, found, strict=True)
    ]
    return [["", "domains", *(f"to {key}" for key in keys)], *rows]


def sample_rows(samples: Iterable[Sample]) -> list[list[str]]:
    rows = [["prompt", "the model", "the source"]]
    for sample in samples:
        written = shortened(one_line(sample.written) + ("" if sample.ended else " ..."), _SHOWN)
        rows.append([f"`{sample.prompt.strip()}`", written, shortened(one_line(sample.expected), _SHOWN)])
    return rows


def acceptance_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Of a tally's record: shares of positions, or tokens in a row; of the domains where the first of these is lowest
    and highest, and of all.
    """
    accepted = {name: shares for name, shares in record["accepted"].items() if name not in _SAME_AS_ALONE}
    titles = [_MEASURES[kind].format(count) for kind, _, count in (name.partition("/") for name in accepted)]
    first = next(iter(accepted.values()))
    (lowest, *_, highest) = sorted((name for name in record["positions"] if name != ALL), key=first.__getitem__)
    rows = [[name, *(f"{shares[name]:.3f}" for shares in accepted.values())] for name in (lowest, highest, ALL)]
    return [["domain", *titles], *rows]


def notices(sources: Iterable[Mapping[str, Any]]) -> str:
    """A list of notices, each once with all packages that it is of; one line each, which no words of it can break."""
    packages: dict[str, dict[str, None]] = {}
    for source in sources:
        packages.setdefault(" ".join(source["notice"].split()), {})[source["package"]] = None
    return "".join(f"- {', '.join(names)}: {words}\n" for words, names in packages.items())


def source_rows(sources: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each domain, in the order of its first source."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for source in sources:
        of.setdefault(source["domain"], []).append(source)
    rows = [["domain", "packages", "MB"]]
    for domain, those in of.items():
        packages = [f"{source['package']} {source['version']} ({source['licence']})" for source in those]
        rows.append([domain, "; ".join(packages), f"{sum(source['bytes'] for source in those) / 1e6:.2f}"])
    return rows
