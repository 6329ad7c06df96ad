"""What a reader must know first: whether figures may be used, answers were right, and the SLO was met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from loadgen.errors import CUT_SHORT, INVALID, MISSED, OK
from loadgen.report.words import METRICS, amount, count, ms, percentile, share
from loadgen.results import Objective, Results, Run, Search, Sweep


class Level(IntEnum):
    """From the best to the worst."""

    GOOD = 0
    MISSED = 1
    """An objective was missed, or requests failed."""
    CUT_SHORT = 2
    """The run was stopped before its end."""
    WRONG = 3
    INVALID = 4
    """The figures say nothing of the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """``text`` is a sentence."""

    level: Level
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """``word`` says the worst in capitals; ``findings`` come with the worst first."""

    level: Level
    word: str
    findings: tuple[Finding, ...]

    @property
    def text(self) -> str:
        """All findings."""
        return " ".join(finding.text for finding in self.findings)

    @property
    def line(self) -> str:
        """The first line of a report."""
        return f"{self.word}: {self.text}"


def verdict(results: Results) -> Verdict:
    """Returns what ``results`` amount to."""
    if isinstance(results, Run):
        findings = list(_of_run(results))
        word = "BROKEN" if _is_broken(results) else None
    elif isinstance(results, Search):
        findings, word = list(_of_search(results)), None
    else:
        findings, word = list(_of_sweep(results)), None
    findings.sort(key=lambda finding: -finding.level)
    worst = findings[0].level
    words = {
        Level.GOOD: "VALID",
        Level.MISSED: "MISSED",
        Level.CUT_SHORT: "CUT SHORT",
        Level.WRONG: "WRONG ANSWERS",
        Level.INVALID: "INVALID",
    }
    return Verdict(level=worst, word=word or words[worst], findings=tuple(findings))


def exit_code(results: Results) -> int:
    """Returns 0 if all is well, 4 for what was cut short, 3 for figures that may not be used, and 1 for wrong answers
    (of such runs, too), failed requests, a missed objective, or an event that did not happen."""
    levels = {finding.level for finding in verdict(results).findings}
    if Level.WRONG in levels:
        return MISSED
    if Level.CUT_SHORT in levels:
        return CUT_SHORT
    if Level.INVALID in levels:
        return INVALID
    return OK if levels == {Level.GOOD} else MISSED


def _is_broken(run: Run) -> bool:
    """Whether no request was answered, though not all were broken off on purpose."""
    return run.counts.ok + run.counts.wrong + run.counts.disconnected == 0


def _of_run(run: Run) -> Iterator[Finding]:
    counts = run.counts
    if _is_broken(run):
        yield Finding(level=Level.INVALID, text=f"No request of {counts.scheduled:,} was answered.")
    if not run.validity.valid:
        reasons = "; ".join(reason.rstrip(".") for reason in run.validity.reasons) or "no reason is given"
        yield Finding(level=Level.INVALID, text=f"The figures say nothing of the server: {reasons}.")
    yield from _cut_short(run)
    yield _answers(run)
    yield from _ends(run)
    yield _slo(run.objectives)
    for event in run.events:
        if event.error is not None:
            what = f"{event.action} {event.target} at {event.at_s:g} s"
            yield Finding(level=Level.MISSED, text=f"An event did not happen: {what} ({event.error.rstrip('.')}).")


def _cut_short(results: Results) -> Iterator[Finding]:
    if (cut := results.cut_short) is None:
        return
    left = []
    if isinstance(results, Run) and results.counts.unfinished:
        left.append(f"{count(results.counts.unfinished, 'request')} under way")
    if cut.unsent:
        left.append(f"{cut.unsent:,} not sent")
    rest = f", with {' and '.join(left)}" if left else ""
    yield Finding(level=Level.CUT_SHORT, text=f"{cut.signal} ended it after {cut.at_s:.0f} s{rest}.")


def _answers(run: Run) -> Finding:
    checked = run.correctness
    if run.counts.wrong:
        among = f" of {checked.checked:,} that were checked" if checked else ""
        verb = "is" if run.counts.wrong == 1 else "are"
        text = f"{count(run.counts.wrong, 'answer')}{among} {verb} wrong"
        allowed = _allowed(run)
        may = f" ({share(allowed, 1.0)} may be)" if allowed else ""
        good = checked is not None and run.counts.wrong <= allowed * checked.checked
        return Finding(level=Level.GOOD if good else Level.WRONG, text=f"{text}{may}.")
    if checked is None:
        return Finding(level=Level.GOOD, text="Answers were not checked.")
    unknown = f" ({checked.unknown:,} have no reference)" if checked.unknown else ""
    return Finding(level=Level.GOOD, text=f"No wrong answer among {checked.checked:,} that were checked{unknown}.")


def _allowed(run: Run) -> float:
    """Returns the share of wrong answers that the run was allowed, by its settings."""
    found = run.settings.get("allow_wrong")
    return float(found) if isinstance(found, int | float) else 0.0


def _ends(run: Run) -> Iterator[Finding]:
    counts = run.counts
    bad = counts.failed + counts.timeout
    if bad and not _is_broken(run):
        text = f"{count(bad, 'request')} of {counts.scheduled:,} failed ({share(bad, counts.scheduled)})."
        yield Finding(level=Level.MISSED, text=text)
    if counts.refused:
        text = f"{count(counts.refused, 'request')} ({share(counts.refused, counts.scheduled)}) ended with a refusal."
        yield Finding(level=Level.GOOD, text=text)


def _slo(objectives: list[Objective]) -> Finding:
    missed = [each for each in objectives if not each.met]
    if missed:
        return Finding(level=Level.MISSED, text=f"SLO missed: {_listed(missed)}.")
    if objectives:
        return Finding(level=Level.GOOD, text=f"SLO met: {_listed(objectives)}.")
    return Finding(level=Level.GOOD, text="No SLO was given.")


def _listed(objectives: list[Objective]) -> str:
    return ", ".join(
        f"{METRICS[each.metric]} {percentile(each.percentile)} {ms(each.value_ms)} (at most {ms(each.target_ms)})"
        for each in objectives
    )


def _of_search(search: Search) -> Iterator[Finding]:
    yield from _cut_short(search)
    tried = [probe for probe in search.probes if probe.verdict != "cut short"]
    wrong = sum(probe.run.counts.wrong for probe in search.probes)
    if wrong:
        yield Finding(level=Level.WRONG, text=f"{count(wrong, 'answer')} came wrong on the way.")
    if tried and all(probe.verdict == "invalid" for probe in tried):
        yield Finding(level=Level.INVALID, text=f"No probe was valid: {tried[-1].why.rstrip('.')}.")
    if search.rate is None:
        if not tried:
            return
        low = min(probe.rate for probe in tried)
        yield Finding(
            level=Level.MISSED, text=f"No rate kept the SLO; the lowest that was tried is {amount(low)} a second."
        )
        return
    above = "" if search.high is None else f", and not {amount(search.high)}"
    text = f"The SLO is kept up to {amount(search.rate)} requests a second{above} ({search.confidence:.0%} confidence)."
    yield Finding(level=Level.GOOD, text=text)


def _of_sweep(sweep: Sweep) -> Iterator[Finding]:
    yield from _cut_short(sweep)
    runs = [point.run for point in sweep.points]
    wrong, invalid = sum(run.counts.wrong for run in runs), sum(not run.validity.valid for run in runs)
    if wrong:
        yield Finding(level=Level.WRONG, text=f"{count(wrong, 'answer')} came wrong on the way.")
    if invalid:
        text = f"{count(invalid, 'load')} of {len(runs)} gave no valid figures."
        yield Finding(level=Level.INVALID if invalid == len(runs) else Level.MISSED, text=text)
    best = max(
        (point for point in sweep.points if point.run.validity.valid),
        key=lambda p: p.run.rates.output_tokens,
        default=None,
    )
    if best is None:
        yield Finding(level=Level.INVALID, text="No load gave valid figures.")
        return
    by = "client" if best.load == 1 else "clients"
    load = f"{amount(best.load)} {'requests a second' if sweep.by == 'rate' else by}"
    text = f"At most {amount(best.run.rates.output_tokens)} output tokens a second, with {load}."
    yield Finding(level=Level.GOOD, text=text)
