"""How a series is declared: its name and text, its labels with their bounds, who writes it and when it is absent.

A label has a bound that holds whatever callers give it: a value outside is counted as :data:`OTHER`. So a page has at
most as many series as :attr:`Definition.most` says, even if a peer sends names that nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

PREFIX = "expertmesh_"
OTHER = "other"
"""Value of a label that stands for all values outside the label's bound."""
_UNITS = ("seconds", "bytes", "tokens", "ratio", "rows")
MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


@dataclass(frozen=True, slots=True)
class Label:
    """A label and its bound: ``values`` alone, or where these are not known, the first ``most`` that come.

    ``of`` says what the values are.
    """

    name: str
    of: str = ""
    values: tuple[str, ...] = ()
    most: int = 0

    def __post_init__(self) -> None:
        assert bool(self.values) != bool(self.most), f"the label {self.name} needs one bound"

    @property
    def bound(self) -> int:
        """The largest number of values on a page, with :data:`OTHER`."""
        return len({*self.values, OTHER}) if self.values else self.most + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A series as docs/metrics.md lists it. ``only`` says when it is on the page, where that is not always."""

    role: str
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[Label, ...] = ()
    only: str = ""
    lines: int = 1
    """Lines of a page for one set of values: a histogram has its buckets, a sum and a count."""

    @property
    def unit(self) -> str:
        return next((unit for unit in _UNITS if unit in self.name.removesuffix("_total").split("_")[-1:]), "")

    @property
    def most(self) -> int:
        """The largest number of lines that the series has on a page."""
        return self.lines * prod(label.bound for label in self.labels)


class _Admission:
    """Lets the values of one label pass, within its bound."""

    def __init__(self, label: Label) -> None:
        self._values, self._most = frozenset(label.values), label.most
        self._seen: set[str] = set()

    def admitted(self, value: object) -> str:
        text = str(value)
        if text == OTHER or text in self._values or text in self._seen:
            return text
        if len(self._seen) >= self._most:
            return OTHER
        self._seen.add(text)
        return text

    def forget(self) -> None:
        self._seen.clear()


class _Bounded(MetricWrapperBase):
    """A metric whose labels keep to their bounds."""

    bounds: tuple[_Admission, ...] = ()

    def labels(self: MetricT, *values: Any, **named: Any) -> MetricT:
        bounds: tuple[_Admission, ...] = self.bounds  # type: ignore[attr-defined]
        given = values or [named[name] for name in self._labelnames]
        return super().labels(*(bound.admitted(value) for bound, value in zip(bounds, given, strict=True)))

    def clear(self) -> None:
        for bound in self.bounds:
            bound.forget()
        super().clear()


class BoundedGauge(_Bounded, Gauge):
    pass


class BoundedCounter(_Bounded, Counter):
    pass


class RareCounter(BoundedCounter):
    """Has no series while nothing was counted."""

    def _child_samples(self) -> Iterable[Sample]:
        return super()._child_samples() if self._value.get() else ()


class BoundedHistogram(_Bounded, Histogram):
    pass


class Series:
    """Makes and lists the series of one role in ``registry``. Their names begin with the project's prefix and ``own``,
    the role's own prefix where it may share a page with another role."""

    def __init__(self, registry: CollectorRegistry, role: str, own: str = "") -> None:
        self._registry, self._role, self._prefix = registry, role, PREFIX + own
        self.definitions: list[Definition] = []

    def gauge(self, name: str, text: str, *labels: Label, only: str = "") -> Gauge:
        self._define(name, "gauge", text, labels, only)
        return _bound(BoundedGauge(self._prefix + name, text, _names(labels), registry=self._registry), labels)

    def counter(self, name: str, text: str, *labels: Label, only: str = "") -> Counter:
        self._define(name, "counter", text, labels, only)
        return _bound(BoundedCounter(self._prefix + name, text, _names(labels), registry=self._registry), labels)

    def rare(self, name: str, text: str) -> Counter:
        """A counter of what most processes never see."""
        self._define(name, "counter", text, (), "once there was one")
        return _bound(RareCounter(self._prefix + name, text, registry=self._registry), ())

    def histogram(self, name: str, text: str, *labels: Label, buckets: tuple[float, ...], only: str = "") -> Histogram:
        self._define(name, "histogram", text, labels, only, lines=len(buckets) + 3)
        made = BoundedHistogram(self._prefix + name, text, _names(labels), buckets=buckets, registry=self._registry)
        return _bound(made, labels)

    def custom(self, name: str, text: str, *labels: Label, only: str = "") -> str:
        """List a gauge that somebody else writes into the page. Returns its name."""
        self._define(name, "gauge", text, labels, only)
        return self._prefix + name

    def _define(
        self,
        name: str,
        kind: Literal["gauge", "counter", "histogram"],
        text: str,
        labels: tuple[Label, ...],
        only: str,
        lines: int = 1,
    ) -> None:
        self.definitions.append(
            Definition(
                role=self._role, name=self._prefix + name, kind=kind, text=text, labels=labels, only=only, lines=lines
            )
        )


def _names(labels: Sequence[Label]) -> list[str]:
    return [label.name for label in labels]


def _bound(metric: MetricT, labels: Sequence[Label]) -> MetricT:
    metric.bounds = tuple(map(_Admission, labels))  # type: ignore[attr-defined]
    return metric
