"""What an expression asks for, and which labels its result has, by reading it: Prometheus answers a wrong name or label
with nothing at all, which looks like a server without faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import promql_parser as promql

from services.metrics.catalogue import catalogue

SCRAPE = frozenset({"namespace", "app_kubernetes_io_instance", "job", "instance", "pod", "role", "exported_instance"})
"""Labels that a scrape adds, whether of the chart's PodMonitor, of `serve`, or of a merged page."""
_VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$price": "3", "$slo": "0.99"}
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Fault(AssertionError):
    """An expression asks for something that there is not."""


@cache
def known() -> Mapping[str, frozenset[str]]:
    """Name of every series, as a query names it -> labels of its own. Those of one name in several roles together."""
    found: dict[str, set[str]] = {"up": set()}
    for series in catalogue():
        labels = {label.name for label in series.labels}
        if series.kind == "histogram":
            found.setdefault(f"{series.name}_bucket", set()).update(labels | {"le"})
            found.setdefault(f"{series.name}_sum", set()).update(labels)
            found.setdefault(f"{series.name}_count", set()).update(labels)
        else:
            found.setdefault(series.name, set()).update(labels)
    return {name: frozenset(labels) for name, labels in found.items()}


def parsed(expression: str) -> Any:
    """Read ``expression``, with Grafana's variables replaced. Raises ValueError for what is no PromQL."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return promql.parse(expression)


def selectors(node: Any) -> Iterator[Any]:
    """The series that ``node`` asks for."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for child in _children(node):
        yield from selectors(child)


def _children(node: Any) -> tuple[Any, ...]:
    match node:
        case promql.AggregateExpr() | promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return (node.expr,)
        case promql.MatrixSelector():
            return (node.vector_selector,)
        case promql.BinaryExpr():
            return (node.lhs, node.rhs)
        case promql.Call():
            return tuple(node.args)
        case promql.VectorSelector() | promql.NumberLiteral() | promql.StringLiteral():
            return ()
    raise Fault(f"cannot read {type(node).__name__}")


def labels(node: Any) -> frozenset[str]:
    """Labels that the result of ``node`` may have.

    Raises:
        Fault: it asks for a series, or by a label, that there is not.
    """
    match node:
        case promql.VectorSelector():
            return _of_series(node)
        case promql.AggregateExpr():
            return _of_aggregate(node)
        case promql.BinaryExpr():
            return _of_pair(node)
        case promql.Call() if node.func.name == "histogram_quantile":
            return _quantile(node)
    found = [labels(child) for child in _children(node)]
    return frozenset().union(*found)


def _of_series(node: Any) -> frozenset[str]:
    if node.name not in known():
        raise Fault(f"no series {node.name}")
    mine = known()[node.name] | SCRAPE
    _there({matcher.name for matcher in node.matchers.matchers}, mine, f"a matcher of {node.name}")
    return mine


def _of_aggregate(node: Any) -> frozenset[str]:
    inner = labels(node.expr)
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    _there(named, inner, f"{node.op} by")
    return named if node.modifier.type == promql.AggModifierType.By else inner - named


def _of_pair(node: Any) -> frozenset[str]:
    left, right = labels(node.lhs), labels(node.rhs)
    if node.modifier and node.modifier.matching:
        _there(set(node.modifier.matching.labels), left & right, f"{node.op} on")
    if str(node.op) == "or":
        return left | right
    return left or right  # a number has none


def _quantile(node: Any) -> frozenset[str]:
    inner = labels(node.args[1])
    _there({"le"}, inner, "histogram_quantile")
    return inner - {"le"}


def _there(asked: set[str] | frozenset[str], found: frozenset[str], where: str) -> None:
    if missing := asked - found:
        raise Fault(f"{where} names {', '.join(sorted(missing))}, of {', '.join(sorted(found)) or 'no labels'}")


def placeholders(text: str) -> set[str]:
    """Labels that a legend names."""
    return set(_PLACEHOLDER.findall(text))


def counters_without_rate(node: Any, *, inside: bool = False) -> Iterator[str]:
    """Counters whose total since a process started is asked for: no such figure says anything."""
    called = isinstance(node, promql.Call) and node.func.name in ("rate", "increase", "irate")
    rated = inside or called or _beside_earlier(node)
    if isinstance(node, promql.VectorSelector) and not rated and re.search(r"_(total|bucket|sum|count)$", node.name):
        yield node.name
    for child in _children(node):
        yield from counters_without_rate(child, inside=rated)


def _beside_earlier(node: Any) -> bool:
    """Whether series are taken that were, or were not, there some time before."""
    sets = isinstance(node, promql.BinaryExpr) and str(node.op) in ("and", "unless")
    return sets and isinstance(node.rhs, promql.VectorSelector) and bool(node.rhs.offset)


def quantiles_in_aggregates(node: Any, *, inside: bool = False) -> bool:
    """Whether quantiles are added up or averaged."""
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile" and inside:
        return True
    aggregates = inside or isinstance(node, promql.AggregateExpr)
    return any(quantiles_in_aggregates(child, inside=aggregates) for child in _children(node))
