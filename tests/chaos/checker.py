"""Judges a history (:mod:`chaos.history`): pure, from lines to what is wrong with them and how long clients waited.

Each rule names what a client may rely on: a request ends once, with the recorded answer, whatever dies meanwhile; it is
refused seldom and not for long; and no gap between its tokens is longer than some leases and the faults in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chaos.history import Line

RULES = {
    "lost": "ends, with all its tokens",
    "doubled": "ends once",
    "changed": "brings the recorded tokens and text",
    "repeated": "brings no token twice",
    "skipped": "leaves no token out",
    "early": "is admitted before anything comes of it",
    "late": "brings nothing after its end",
    "unknown": "begins before anything is heard of it, and once",
}
"""What each request does, by the word for one that does not."""
_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Of refusals: the share of requests that met one, and the longest time for which one client met nothing else. Of
    a gap between two tokens of a request: its length in s, faults that lasted meanwhile not counted."""

    refused_share: float
    refused_s: float
    gap_s: float


@dataclass(slots=True)
class _Request:
    job: int
    admitted: bool = False
    brought: int = 0
    """Tokens of this try."""
    known: int = 0
    """Tokens of all tries."""
    last_at: float = 0.0
    """When the last token that was new came."""
    refused_at: float | None = None
    refused: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    begin: float
    end: float


@dataclass(kw_only=True, slots=True)
class Findings:
    """``problems``: how often each rule was broken; ``examples`` of that in words. ``gaps``: the long ones."""

    requests: int = 0
    lines: int = 0
    tries: int = 0
    refusals: int = 0
    broken: int = 0
    refused_requests: int = 0
    refused_s: float = 0.0
    """The longest time for which one client was refused."""
    outage_s: float = 0.0
    """The longest time for which all clients were."""
    longest_gap_s: float = 0.0
    excess_s: float = 0.0
    """The longest gap without the faults in it."""
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def refused_share(self) -> float:
        return self.refused_requests / max(1, self.requests)

    def over(self, bounds: Bounds) -> list[str]:
        """Why the history is not good enough; empty if it is."""
        reasons = [f"history: {count} {rule}" for rule, count in sorted(self.problems.items())]
        if self.refused_share > bounds.refused_share:
            reasons.append(f"{self.refused_share:.1%} of requests were refused, over {bounds.refused_share:.0%}")
        if self.refused_s > bounds.refused_s:
            reasons.append(f"a client was refused for {self.refused_s:.1f} s, over {bounds.refused_s:g} s")
        if self.excess_s > bounds.gap_s:
            reasons.append(
                f"a gap between tokens outlasted its faults by {self.excess_s:.1f} s, over {bounds.gap_s:g} s"
            )
        return reasons

    def figures(self, bounds: Bounds) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "requests": self.requests,
            "tries": self.tries,
            "broken": self.broken,
            "problems": dict(self.problems),
            "examples": self.examples,
            "refusals": {
                "count": self.refusals,
                "share_of_requests": round(self.refused_share, 4),
                "longest_s": round(self.refused_s, 3),
                "longest_of_all_s": round(self.outage_s, 3),
                "bounds": {"share_of_requests": bounds.refused_share, "longest_s": bounds.refused_s},
            },
            "gaps": {
                "longest_s": round(self.longest_gap_s, 3),
                "without_faults_s": round(self.excess_s, 3),
                "bound_s": bounds.gap_s,
            },
        }


def check(lines: Iterable[Line], *, long_s: float = 1.0) -> Findings:
    """Judges a whole history. Gaps of less than ``long_s`` are not compared with faults."""
    checker = _Checker(long_s)
    for line in lines:
        checker.take(line)
    return checker.finish()


class _Checker:
    def __init__(self, long_s: float) -> None:
        self._found = Findings()
        self._answers: dict[int, Line] = {}
        self._requests: dict[str, _Request] = {}
        self._gaps: list[Gap] = []
        self._faults: list[tuple[float, float]] = []
        self._begun: dict[tuple[str, str], float] = {}
        self._all_refused_at: float | None = None
        self._long_s = long_s

    def take(self, line: Line) -> None:
        self._found.lines += 1
        if line.what == "answer":
            self._answers[line.job] = line
        elif line.what == "fault":
            self._begun[line.key, line.target] = line.at
        elif line.what == "over":
            self._faults.append((self._begun.pop((line.key, line.target)), line.at))
        elif line.what == "invoke":
            self._invoke(line)
        elif (request := self._requests.get(line.key)) is None:
            self._wrong("unknown", line)
        elif request.ended:
            self._wrong("doubled" if line.what in ("end", "failed") else "late", line)
        else:
            getattr(self, f"_{line.what}")(request, line)

    def finish(self) -> Findings:
        for key, request in self._requests.items():
            if not request.ended:
                self._wrong("lost", Line(what="failed", key=key, text="never ended"))
            self._found.refused_requests += request.refused
        for gap in self._gaps:
            within = sum(max(0.0, min(gap.end, end) - max(gap.begin, begin)) for begin, end in self._faults)
            self._found.excess_s = max(self._found.excess_s, gap.end - gap.begin - within)
        return self._found

    def _wrong(self, rule: str, line: Line) -> None:
        assert rule in RULES
        self._found.problems[rule] += 1
        if len(self._found.examples) < _EXAMPLES:
            facts = f"{line.what} {line.text or line.status or ''} {list(line.ids) or ''}"
            self._found.examples.append(f"{line.at:.3f} s, {line.key}: not one that {RULES[rule]}: {facts}")

    def _invoke(self, line: Line) -> None:
        if line.key in self._requests or line.job not in self._answers:
            return self._wrong("unknown", line)
        self._requests[line.key] = _Request(line.job)
        self._found.requests += 1
        return None

    def _refused(self, request: _Request, line: Line) -> None:
        if request.admitted:
            return self._wrong("early", line)
        self._found.tries += 1
        self._found.refusals += 1
        request.refused = True
        request.refused_at = line.at if request.refused_at is None else request.refused_at
        self._all_refused_at = line.at if self._all_refused_at is None else self._all_refused_at
        self._found.refused_s = max(self._found.refused_s, line.at - request.refused_at)
        return None

    def _admitted(self, request: _Request, line: Line) -> None:
        self._found.tries += 1
        if request.refused_at is not None:
            self._found.refused_s = max(self._found.refused_s, line.at - request.refused_at)
        if self._all_refused_at is not None:
            self._found.outage_s = max(self._found.outage_s, line.at - self._all_refused_at)
        request.refused_at = self._all_refused_at = None
        request.admitted, request.brought = True, 0

    def _broken(self, request: _Request, line: Line) -> None:
        if not request.admitted:
            return self._wrong("early", line)
        request.admitted = False
        self._found.broken += 1
        return None

    def _tokens(self, request: _Request, line: Line) -> None:
        if not request.admitted:
            self._wrong("early", line)
        if line.index != request.brought:
            self._wrong("repeated" if line.index < request.brought else "skipped", line)
        request.brought = line.index + len(line.ids)
        if line.ids != self._answers[request.job].ids[line.index : request.brought]:
            self._wrong("changed", line)
        if request.brought > request.known:
            self._progress(request, line)

    def _progress(self, request: _Request, line: Line) -> None:
        if request.known:
            waited = line.at - request.last_at
            self._found.longest_gap_s = max(self._found.longest_gap_s, waited)
            if waited >= self._long_s:
                self._gaps.append(Gap(request.last_at, line.at))
        request.known, request.last_at = request.brought, line.at

    def _end(self, request: _Request, line: Line) -> None:
        wanted = self._answers[request.job]
        request.ended = True
        if not request.admitted:
            self._wrong("early", line)
        elif request.brought < len(wanted.ids):
            self._wrong("lost", line)
        elif (line.text, line.finish) != (wanted.text, wanted.finish):
            self._wrong("changed", line)

    def _failed(self, request: _Request, line: Line) -> None:
        request.ended = True
        self._wrong("lost", line)
