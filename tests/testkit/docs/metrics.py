"""Writes docs/metrics.md from the declarations of the series.

    PYTHONPATH=tests python -m testkit.docs.metrics [--check]

``--check`` changes nothing, and ends with 1 where the file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.metrics import Definition, catalogue
from services.metrics.attention import WorkerMetrics
from services.metrics.gateway import GatewayMetrics
from services.metrics.scheduler import SchedulerMetrics
from services.metrics.series import PREFIX, Label
from services.metrics.vllm import Copy, of_gateway, of_scheduler, of_worker

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
MARKS = ("<!-- series: begin, written by python -m testkit.docs.metrics -->", "<!-- /series -->")
TITLES = {
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "attention": "Attention worker",
    "experts": "Expert worker",
    "serve": "`expertmesh serve`",
    "workers": "`expertmesh workers`",
    "gateway of `serve`, workers": "Merged pages",
    "every process": "Every process",
}
"""What writes the series; a colocated worker writes those of an attention and of an expert worker."""


def page(text: str) -> str:
    """``text`` with the tables of all series between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return "".join((before, MARKS[0], "\n", "\n".join(_tables(catalogue())), MARKS[1], after))


def _tables(series: Sequence[Definition]) -> Iterator[str]:
    for role, of_role in groupby(series, key=lambda one: one.role):
        yield from (
            f"## {TITLES[role]}",
            "",
            "| `expertmesh_…` | type, unit | labels | meaning |",
            "| --- | --- | --- | --- |",
        )
        yield from (_row(one) for one in of_role)
        yield ""
    yield from ("## Names of vLLM", "", "| `vllm:…` | is `expertmesh_…` | of |", "| --- | --- | --- |")
    for role, copies in vllm_names().items():
        yield from (f"| `{_name(copy)}` | `{_source(copy)}` | {role} |" for copy in copies)
    yield ""


def vllm_names() -> dict[str, tuple[Copy, ...]]:
    return {
        "gateway": of_gateway(GatewayMetrics(CollectorRegistry())),
        "scheduler": of_scheduler(SchedulerMetrics(CollectorRegistry())),
        "attention worker": of_worker(WorkerMetrics(CollectorRegistry())),
    }


def _name(copy: Copy) -> str:
    return copy.name + _suffix(copy)


def _source(copy: Copy) -> str:
    return copy.source._name.removeprefix(PREFIX) + _suffix(copy)


def _suffix(copy: Copy) -> str:
    return "_total" if copy.source._type == "counter" else ""


def _row(one: Definition) -> str:
    kind = f"{one.kind}, {one.unit}" if one.unit else one.kind
    labels = "; ".join(map(_label, one.labels))
    only = f" Only {one.only}." if one.only else ""
    return f"| `{one.name.removeprefix(PREFIX)}` | {kind} | {labels} | {one.text}{only} |"


def _label(label: Label) -> str:
    if label.values:
        values = label.values if len(label.values) < 10 else (label.values[0], "…", label.values[-1])
        known = ", ".join(values)
    else:
        known = f"at most {label.most}"
    return f"`{label.name}`: {f'{label.of} ({known})' if label.of else known}"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if new != text and "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    return int(new != text and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
