"""The figures of a run as tables: what it was, how much went through, how long it took, what it cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from loadgen.report import details
from loadgen.report.cost import cost
from loadgen.report.table import LONGEST, Table, pairs
from loadgen.report.words import MEANINGS, METRICS, amount, moment, ms, percentile, seconds, share
from loadgen.results import Group, Latency, Run


def configuration(run: Run) -> Table:
    return pairs(
        "Configuration",
        [
            ("run", run.label),
            ("server", run.target.url + (f" ({run.target.server})" if run.target.server else "")),
            ("model", run.target.model),
            ("requests", f"{run.target.endpoint}, {'streamed' if run.target.stream else 'not streamed'}"),
            ("schedule", run.schedule.text),
            ("workload", run.workload.text),
            ("began", moment(run.began_at)),
            ("duration", seconds(run.duration_s)),
            ("processes", f"{len(run.shards)} that share the schedule" if len(run.shards) > 1 else None),
            ("expertmesh-load", run.version),
            ("command", _command(run)),
        ],
    )


def _command(run: Run) -> str | None:
    """Returns how to do it again; None where the run does not know."""
    words = run.settings.get("command")
    return shlex.join(["expertmesh-load", "run", *map(str, words)])[:LONGEST] if isinstance(words, list) else None


def throughput(run: Run) -> Table:
    rates = run.rates
    return pairs(
        "Throughput",
        [
            ("requests", f"{amount(rates.requests)}/s"),
            ("output tokens", f"{amount(rates.output_tokens)}/s"),
            ("prompt tokens", None if rates.prompt_tokens is None else f"{amount(rates.prompt_tokens)}/s"),
            ("goodput", None if rates.goodput is None else f"{amount(rates.goodput)}/s"),
        ],
        note="Goodput counts right answers within all objectives." if rates.goodput is not None else "",
    )


def requests(run: Run) -> Table:
    counts = run.counts
    ends = ("ok", "wrong", "refused", "failed", "timeout", "disconnected", "unfinished")
    ended = [(name, getattr(counts, name)) for name in ends]
    return pairs(
        "Requests",
        [
            ("scheduled", f"{counts.scheduled:,}"),
            *(
                (name, f"{value:,} ({share(value, counts.scheduled)})")
                for name, value in ended
                if value or name == "ok"
            ),
            ("tries", f"{counts.tries:,}"),
            ("sent again", f"{counts.retried:,}"),
            ("answers 429", f"{counts.refused_429:,}"),
            ("answers 503", f"{counts.refused_503:,}"),
            ("that said how long to wait", f"{counts.retry_after:,}"),
            ("connections", f"{counts.connections:,}" if counts.connections else None),
        ],
    )


def latencies(run: Run) -> Table:
    known = [(metric, run.latency[metric]) for metric in METRICS if metric in run.latency]
    return Table(
        title="Latency",
        head=("", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"),
        rows=[(METRICS[metric], f"{each.count:,}", *_figures(each)) for metric, each in known],
        note="; ".join(f"{METRICS[metric]}: {MEANINGS[metric]}" for metric, _ in known) + ".",
    )


def _figures(each: Latency) -> list[str]:
    values = (each.mean_ms, each.p50_ms, each.p90_ms, each.p95_ms, each.p99_ms, each.p99_9_ms, each.max_ms)
    return [ms(value) for value in values]


def objectives(run: Run) -> Table:
    return Table(
        title="Objectives",
        head=("", "at most", "measured", "95 % between", "within", "met"),
        rows=[
            (
                f"{METRICS[each.metric]} {percentile(each.percentile)}",
                ms(each.target_ms),
                ms(each.value_ms),
                "–" if each.low_ms is None or each.high_ms is None else f"{ms(each.low_ms)} and {ms(each.high_ms)}",
                "–" if each.share_within is None else share(each.share_within, 1.0),
                "yes" if each.met else "no",
            )
            for each in run.objectives
        ],
        text=(5,),
    )


def errors(run: Run) -> Table:
    return Table(
        title="Errors",
        head=("kind", "count", "first", "last", "example"),
        rows=[
            (
                each.kind,
                f"{each.count:,}",
                f"{each.first_at_s:.1f} s",
                f"{each.last_at_s:.1f} s",
                each.example[:LONGEST],
            )
            for each in sorted(run.errors, key=lambda each: -each.count)
        ],
        text=(4,),
    )


def groups(title: str, found: Sequence[Group]) -> Table:
    """Returns a table of the tenants, the priorities or the classes."""
    return Table(
        title=title,
        head=(
            "",
            "requests",
            "ok",
            "refused",
            "failed",
            "tokens/s",
            "share",
            "TTFT p50",
            "TTFT p99",
            "ITL p99",
            "end to end p99",
        ),
        rows=[
            (
                each.name,
                f"{each.counts.scheduled:,}",
                f"{each.counts.ok:,}",
                f"{each.counts.refused:,}",
                f"{each.counts.failed + each.counts.timeout + each.counts.wrong:,}",
                amount(each.rates.output_tokens),
                share(each.share, 1.0),
                ms(each.latency["ttft"].p50_ms) if "ttft" in each.latency else "–",
                ms(each.latency["ttft"].p99_ms) if "ttft" in each.latency else "–",
                ms(each.latency["itl"].p99_ms) if "itl" in each.latency else "–",
                ms(each.latency["e2e"].p99_ms) if "e2e" in each.latency else "–",
            )
            for each in found
        ],
    )


def costs(run: Run) -> Table:
    found = cost(run)
    if found is None:
        return Table(title="Cost", rows=[])
    return pairs(
        "Cost",
        [
            ("GPUs", f"{found.gpus:g}"),
            ("GPU-hours of this run", f"{found.gpu_hours:.4g}"),
            ("output tokens per GPU-hour", f"{found.output_tokens_per_gpu_hour:,.0f}"),
            ("price of a GPU-hour", None if found.price is None else f"{found.price:g}"),
            ("cost of this run", None if found.of_run is None else f"{found.of_run:.4g}"),
            (
                "cost of a million output tokens",
                None if found.per_million_output_tokens is None else f"{found.per_million_output_tokens:.4g}",
            ),
        ],
    )


def of_run(run: Run) -> list[Table]:
    """Returns the tables that have something to say, in the order of a report, but for latency and objectives."""
    found = [
        throughput(run),
        requests(run),
        costs(run),
        details.validity(run),
        details.fairness(run),
        details.events(run),
        errors(run),
        details.correctness(run),
        groups("Tenants", run.tenants),
        groups("Priorities", run.priorities),
        groups("Classes", run.classes),
        details.slowest(run),
        configuration(run),
        details.surroundings(run),
    ]
    return [table for table in found if table.rows or table.note]
