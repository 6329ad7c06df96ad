"""Draws one trace as a tree with a bar for each span. In: the spans. Out: lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text

from services.cli.trace.files import Record

FEW = 3
"""More spans than these with one name under one parent are one line."""
_SHOWN_EVENTS = ("first token", "preempted", "resumed")
_PHASE = "expertmesh.phase"
_BAR, _LEAST_BAR = "█", 12


@dataclass(kw_only=True, slots=True)
class Node:
    """One line: a span, or several with the same name."""

    spans: list[Record]
    children: list[Node] = field(default_factory=list)
    orphan: bool = False

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)

    @property
    def label(self) -> str:
        first, count = self.spans[0], len(self.spans)
        name = f"{first.name} x {count}" if count > 1 else first.name
        if (attempt := first.attributes.get("expertmesh.attempt")) is not None:
            choice = first.attributes.get("expertmesh.choice", 0)
            name = f"attempt {attempt}" + (f" of choice {choice}" if choice else "")
        return f"{name} (its parent was lost)" if self.orphan else name


def nodes_of(spans: Sequence[Record], *, collapse: bool = True) -> list[Node]:
    """Return the roots of the trace of ``spans``, which are in the order of their beginnings. Exchanges stand under the
    phase that they belong to. A span whose parent was not written, because its process was killed, is a root."""
    nodes = {span.span_id: Node(spans=[span]) for span in spans}
    roots: list[Node] = []
    phases = {(span.parent_id, span.name): span.span_id for span in spans}
    for span in spans:
        phase = phases.get((span.parent_id, str(span.attributes.get(_PHASE))))
        parent = nodes.get(phase or span.parent_id)
        if parent is None:
            nodes[span.span_id].orphan = bool(roots)
            roots.append(nodes[span.span_id])
        else:
            parent.children.append(nodes[span.span_id])
    return _collapsed(roots) if collapse else roots


def _collapsed(nodes: Sequence[Node]) -> list[Node]:
    def name(node: Node) -> str:
        return node.spans[0].name

    found: list[Node] = []
    for _, alike in groupby(sorted(nodes, key=lambda node: (name(node), node.start_ns)), name):
        group = list(alike)
        if len(group) > FEW:
            spans = [span for node in group for span in node.spans]
            children = [child for node in group for child in node.children]
            group = [Node(spans=spans, children=children, orphan=all(node.orphan for node in group))]
        found += group
    for node in found:
        node.children = _collapsed(node.children)
    return sorted(found, key=lambda node: (node.start_ns, -node.end_ns))


def lines(roots: Sequence[Node], width: int) -> list[Text]:
    """Return the tree in lines of ``width`` columns."""
    flat = [row for root in roots for row in _rows(root, "", "")]
    start_ns = min(root.start_ns for root in roots)
    whole_ns = max(1, max(node.end_ns for *_, node in flat) - start_ns)
    head = max(len(prefix + node.label) for prefix, _, node in flat)
    process = max(len(_processes(node)) for *_, node in flat)
    room = max(_LEAST_BAR, width - head - process - 28)
    found: list[Text] = []
    for prefix, rest, node in flat:
        text = Text(f"{prefix}{node.label:<{head - len(prefix)}}  ")
        text.append(f"{_processes(node):<{process}}", style="dim")
        text.append(f"  {_ms(node.start_ns - start_ns):>11}  {_ms(_spent(node)):>11}  ")
        failed = any(span.error for span in node.spans)
        text.append(_bar(node, start_ns, whole_ns, room), style="red" if failed else "cyan")
        found.append(text)
        below = rest + ("│ " if node.children else "  ")
        found += [Text(f"{below}  {note}", style="dim") for note in _notes(node, start_ns)]
    return found


def _rows(node: Node, first: str, rest: str) -> Iterator[tuple[str, str, Node]]:
    """Yield what stands before each line, what stands before notes below it, and its node."""
    yield first, rest, node
    for number, child in enumerate(node.children, 1):
        last = number == len(node.children)
        yield from _rows(child, rest + ("└ " if last else "├ "), rest + ("  " if last else "│ "))


def _notes(node: Node, start_ns: int) -> Iterator[str]:
    for span in node.spans[:1] if len(node.spans) == 1 else ():
        for event in span.events:
            if event.name in _SHOWN_EVENTS:
                yield f"{event.name} at {_ms(event.at_ns - start_ns)}"
    for error in dict.fromkeys(span.error for span in node.spans if span.error):
        yield f"failed: {error}"
    resent = sum(span.attributes.get("expertmesh.resent_rows", 0) for span in node.spans)
    if resent:
        yield f"{resent} rows were sent to another replica"


def _processes(node: Node) -> str:
    names = sorted({span.process for span in node.spans})
    return names[0] if len(names) == 1 else f"{len(names)} processes"


def _spent(node: Node) -> int:
    return sum(span.end_ns - span.start_ns for span in node.spans)


def _bar(node: Node, start_ns: int, whole_ns: int, room: int) -> str:
    begin = round((node.start_ns - start_ns) / whole_ns * room)
    length = max(1, round((node.end_ns - node.start_ns) / whole_ns * room))
    begin = min(begin, room - 1)
    return " " * begin + _BAR * min(length, room - begin)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.2f} ms"
