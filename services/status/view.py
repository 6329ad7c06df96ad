"""A status as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from services.placement import counted
from services.runtime import printable
from services.status.queue import Queue
from services.status.release import Release
from services.status.verdict import Status

_NAMES = 4
"""Names of workers in a line; a deployment may have thousands."""


def as_json(status: Status) -> str:
    return json.dumps(
        {
            "servable": status.servable,
            "asleep": status.asleep,
            "sleep_level": status.sleeps,
            "server": status.server or None,
            "missing": [_one_line(text) for text in status.missing],
            "troubles": [_one_line(text) for text in status.troubles],
            "notes": list(status.notes),
            "kubernetes": asdict(status.release) if status.release else None,
            "redis": asdict(status.queue) if status.queue else None,
        },
        indent=2,
    )


def as_text(status: Status) -> str:
    return "\n".join(map(printable, _lines(status)))  # last words of pods may be a client's


def _lines(status: Status) -> Iterator[str]:
    yield _headline(status)
    yield from _list("missing", status.missing)
    yield from _list("troubles", status.troubles)
    if status.release:
        yield from ("", *_release(status.release))
    if status.queue and not status.queue.problem:
        yield from ("", *_queue(status.queue))
    if status.notes:
        yield from ("", *status.notes)


def _headline(status: Status) -> str:
    name = status.server or "The deployment"
    if status.release:
        name = f"{status.release.name} in namespace {status.release.namespace}"
    if not status.servable:
        return f"{name} cannot serve its model."
    if status.sleeps:
        return f"{name} sleeps at level {status.sleeps}; POST /wake_up wakes it, and requests wait for that."
    return f"{name} is asleep; a request wakes it." if status.asleep else f"{name} serves its model."


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        first, *rest = text.splitlines()
        yield f"  {title}: {first}"
        yield from (f"    {line}" for line in rest)


def _release(release: Release) -> Iterator[str]:
    rows = [("workload", "ready", "restarts")]
    for each in release.workloads:
        restarts = sum(pod.restarts for pod in release.pods_of(each))
        rows.append((each.title, f"{each.ready}/{each.wanted}", str(restarts)))
    rows += [("model fetch", f"{int(each.done)}/1", str(each.failed)) for each in release.fetches]
    yield from _columns(rows)


def _queue(queue: Queue) -> Iterator[str]:
    rows = [
        ("leading scheduler", queue.leader or "none"),
        ("gateways", str(queue.gateways)),
        ("attention workers", _attention(queue)),
        ("queue", f"{queue.requests} requests, {queue.tokens} tokens; {queue.dead_letters} dead letters"),
    ]
    if queue.groups:
        rows.append(("routing table", f"epoch {queue.epoch}" if queue.epoch else "none yet"))
    for number, group in queue.groups.items():
        coming = "".join(f", {count} {word}" for word, count in group.coming.items())
        rows.append((f"shard group {number}", f"{counted(group.seats, 'seat')}{_named(group.workers)}{coming}"))
    yield from _columns(rows)


def _attention(queue: Queue) -> str:
    why = "sleep" if queue.sleep else "miss experts"
    blocked = f", {len(queue.blocked)} {why}{_named(queue.blocked)}" if queue.blocked else ""
    return f"{len(queue.workers)}{_named(queue.workers)}{blocked}"


def _named(names: Sequence[str]) -> str:
    """Return the first names in brackets."""
    shown = [*names[:_NAMES], *(["..."] if len(names) > _NAMES else [])]
    return f" ({', '.join(shown)})" if names else ""


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _one_line(text: str) -> str:
    return "; ".join(text.splitlines())
