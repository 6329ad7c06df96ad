"""The rest of a run's tables: who got what, which answers were wrong, what happened, and where."""

from __future__ import annotations

from loadgen.report.table import LONGEST, Table, pairs
from loadgen.report.words import ms, seconds
from loadgen.results import Event, Run


def fairness(run: Run) -> Table:
    found = run.fairness
    rows: list[tuple[str, str | None]] = []
    if found is not None:
        rows = [
            ("tokens a second over the weight", f"{found.index:.3f}"),
            ("mean TTFT", None if found.slowdown is None else f"{found.slowdown:.3f}"),
        ]
    return pairs(
        "Fairness",
        rows,
        note=f"Jain's index over {found.tenants} tenants: 1 is even, {1 / found.tenants:.3g} is one alone."
        if found
        else "",
    )


def correctness(run: Run) -> Table:
    found = run.correctness
    rows = (
        []
        if found is None
        else [
            (f"request {each.number}", str(each.differs_at), each.expected[:LONGEST], each.found[:LONGEST])
            for each in found.examples
        ]
    )
    note = (
        ""
        if found is None
        else (
            f"Compared with {found.reference}: {found.wrong:,} of {found.checked:,} answers are wrong"
            f"{f', {found.unknown:,} have no reference' if found.unknown else ''}."
        )
    )
    return Table(title="Correctness", head=("", "differs at", "expected", "found"), rows=rows, text=(2, 3), note=note)


def events(run: Run) -> Table:
    rows = []
    for number, event in enumerate(run.events):
        until = next((other.at_s for other in run.events[number + 1 :] if other.at_s > event.at_s), run.duration_s)
        ttft, gap = (_longest(run, metric, event, until) for metric in ("ttft", "itl"))
        when = f"{event.at_s if event.began_s is None else event.began_s:.2f} s"
        rows.append((str(number + 1), when, event.action, event.target, event.error or event.detail, ms(ttft), ms(gap)))
    return Table(
        title="Events",
        head=("", "at", "what", "to", "which", "longest TTFT until the next", "longest gap until the next"),
        rows=rows,
        text=(1, 2, 3, 4),
        note="Numbers are those of the marks over the plots." if rows else "",
    )


def _longest(run: Run, metric: str, event: Event, until: float) -> float | None:
    """Returns the longest wait of the seconds from ``event`` until ``until``."""
    since = event.at_s if event.began_s is None else event.began_s
    found = [getattr(each, metric) for each in run.timeline if since < each.at_s + each.seconds and each.at_s < until]
    return max((each.max_ms for each in found if each is not None), default=None)


def slowest(run: Run) -> Table:
    return Table(
        title="Slowest requests",
        head=("number", "scheduled", "waited for its first token", "ended as", "tries", "tenant", "id"),
        rows=[
            (
                f"{each.number}",
                f"{each.scheduled_s:.2f} s",
                "–" if each.first_token_s is None else seconds(each.first_token_s - each.scheduled_s),
                each.outcome,
                f"{each.tries}",
                each.tenant or "–",
                each.request_id or "–",
            )
            for each in run.slowest
        ],
        text=(3, 5, 6),
    )


def validity(run: Run) -> Table:
    found = run.validity
    return pairs(
        "Validity",
        [
            ("send lag p99", ms(found.lag_p99_ms)),
            ("it may be", None if found.lag_limit_ms is None else ms(found.lag_limit_ms)),
            *(("not valid", reason) for reason in found.reasons),
            *(("note", warning) for warning in found.warnings),
            *(
                (
                    f"process {each.index + 1} of {each.of}",
                    f"{each.requests:,} requests, lag p99 {ms(each.lag_p99_ms)}, {seconds(each.late_start_s)} late",
                )
                for each in run.shards
                if len(run.shards) > 1
            ),
        ],
    )


def surroundings(run: Run) -> Table:
    """Returns the machine that sent the load."""
    rows = [(name.replace("_", " "), str(value)[:LONGEST]) for name, value in run.environment.items()]
    return pairs("Environment", rows)
