"""The difference of two results files in words and numbers: what it compares of runs, of searches and of sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loadgen.errors import ResultsUnreadable
from loadgen.report.compare import Change, Comparison, Difference, Limits, compare
from loadgen.report.grid import grid, printable
from loadgen.report.junit import Case
from loadgen.report.table import Table
from loadgen.report.words import amount, ms, share
from loadgen.results import Results, Run, Search, Sweep

WORDS: Final[Mapping[Change, str]] = {
    "better": "BETTER",
    "worse": "WORSE",
    "none": "NO DIFFERENCE",
    "unclear": "UNCLEAR",
}
_SAID: Final[Mapping[Change, str]] = {
    "worse": "Worse in",
    "better": "Better in",
    "unclear": "Too short or unsteady for:",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One comparison of two runs, and what it is about: empty for two single runs."""

    title: str
    comparison: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """``verdict`` is the worst of all parts. ``invalid``: why the figures may not be used."""

    verdict: Change
    invalid: Sequence[str]
    notes: Sequence[str]
    parts: Sequence[Part]

    @property
    def line(self) -> str:
        """The first line."""
        if self.invalid:
            return f"INVALID: {'; '.join(self.invalid)}."
        said = [
            f"{word} {', '.join(names)}."
            for change, word in _SAID.items()
            if (names := [name for part in self.parts for name in _named(part, change)])
        ]
        return f"{WORDS[self.verdict]}: {' '.join(said) or 'All intervals are within the threshold.'}"


def _named(part: Part, change: Change) -> list[str]:
    return [f"{name} at {part.title}" if part.title else name for name in part.comparison.named(change)]


def diff(before: Results, after: Results, limits: Limits) -> Diff:
    """Returns what ``after`` differs in from ``before``.

    Raises:
        ResultsUnreadable: they are of different kinds, or have no load in common.
    """
    if isinstance(before, Run) and isinstance(after, Run):
        return _joined([Part(title="", comparison=compare(before, after, limits))])
    if isinstance(before, Search) and isinstance(after, Search):
        return _joined([Part(title="", comparison=_of_searches(before, after, limits))])
    if isinstance(before, Sweep) and isinstance(after, Sweep):
        return _joined(list(_of_sweeps(before, after, limits)))
    kinds = " and ".join(f"a {type(each).__name__.lower()}" for each in (before, after))
    raise ResultsUnreadable(f"Only two of a kind can be compared, not {kinds}.")


def _joined(parts: Sequence[Part]) -> Diff:
    found = {part.comparison.verdict for part in parts}
    order: Sequence[Change] = ("worse", "better", "none")
    unique = dict.fromkeys(note for part in parts for note in part.comparison.notes)
    return Diff(
        verdict=next((each for each in order if each in found), "unclear"),
        invalid=[reason for part in parts for reason in part.comparison.invalid],
        notes=list(unique),
        parts=parts,
    )


def _of_searches(before: Search, after: Search, limits: Limits) -> Comparison:
    """Compares the rates that were found: sure only where the brackets do not overlap."""
    first, second = before.rate or 0.0, after.rate or 0.0
    verdict: Change = "none"
    change = second / first - 1 if first else None
    if before.high is not None and second > before.high and (change is None or change > limits.threshold):
        verdict = "better"
    elif after.high is not None and first > after.high and change is not None and change < -limits.threshold:
        verdict = "worse"
    found = Difference(
        name="highest rate that keeps the SLO",
        unit="1/s",
        before=first,
        after=second,
        change=change,
        low=None,
        high=None,
        verdict=verdict,
    )
    slo = [[(each.metric, each.percentile, each.target_ms) for each in search.objectives] for search in (before, after)]
    notes = ["another SLO"] if slo[0] != slo[1] else []
    return Comparison(invalid=[], notes=notes, differences=[found])


def _of_sweeps(before: Sweep, after: Sweep, limits: Limits) -> Iterator[Part]:
    """Yields a comparison for each load that both have; a saturated one has no steady latency."""
    earlier = {point.load: point for point in before.points}
    common = [point for point in after.points if point.load in earlier]
    if before.by != after.by or not common:
        raise ResultsUnreadable("The two sweeps have no load in common.")
    for point in common:
        title = f"{amount(point.load)} {'requests/s' if after.by == 'rate' else 'clients'}"
        yield Part(title=title, comparison=compare(earlier[point.load].run, point.run, limits))


def text(found: Diff, limits: Limits) -> str:
    """Returns lines for a terminal."""
    notes = [f"Not the same load: {printable(note)}." for note in found.notes]
    how = f"Sure by {limits.confidence:.0%}; changes of up to {limits.threshold:.0%} do not count."
    return (
        "\n\n".join([printable(found.line), *notes, *(grid(table(part, limits)) for part in found.parts), how]) + "\n"
    )


def table(part: Part, limits: Limits) -> Table:
    """Returns the differences of one comparison."""
    rows = [
        (each.name, _value(each, each.before), _value(each, each.after), *_change(each), _WORDS[each.verdict])
        for each in part.comparison.differences
    ]
    head = ("", "before", "after", "change", f"between ({limits.confidence:.0%})", "")
    return Table(title=part.title or "Differences", head=head, rows=rows, text=(5,))


_WORDS: Final[Mapping[Change, str]] = {
    "better": "better",
    "worse": "worse",
    "none": "no difference",
    "unclear": "unclear",
}


def _value(each: Difference, value: float) -> str:
    return {"ms": ms(value), "1/s": f"{amount(value)}/s", "share": share(value, 1.0)}[each.unit]


def _change(each: Difference) -> tuple[str, str]:
    sign = "points" if each.unit == "share" else "%"
    if each.change is None:
        return "–", "–"
    between = (
        "–" if each.low is None or each.high is None else f"{100 * each.low:+.1f} to {100 * each.high:+.1f} {sign}"
    )
    return f"{100 * each.change:+.1f} {sign}", between


def as_json(found: Diff, limits: Limits) -> dict[str, Any]:
    """Returns what programs read: names, values and bounds as in :class:`~loadgen.report.compare.Difference`."""
    return {
        "verdict": found.verdict,
        "invalid": list(found.invalid),
        "notes": list(found.notes),
        "threshold": limits.threshold,
        "confidence": limits.confidence,
        "parts": [
            {
                "title": part.title,
                "differences": [
                    {name: getattr(each, name) for name in Difference.__slots__} for each in part.comparison.differences
                ],
            }
            for part in found.parts
        ],
    }


def cases(found: Diff, limits: Limits) -> list[Case]:
    """Returns the differences as test cases, which fail where something is worse."""
    valid = Case(name="both runs are valid", failure="; ".join(found.invalid) or None)
    return [valid, *(_case(part, each, limits) for part in found.parts for each in part.comparison.differences)]


def _case(part: Part, each: Difference, limits: Limits) -> Case:
    name = f"{each.name} is not worse" + (f" at {part.title}" if part.title else "")
    change, between = _change(each)
    said = (
        f"{_value(each, each.before)}, then {_value(each, each.after)}: {change} ({limits.confidence:.0%}: {between})"
    )
    return Case(name=name, failure=said if each.verdict == "worse" else None, said=said)
