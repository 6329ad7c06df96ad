"""What Prometheus knows of the time of a run, as :class:`~loadgen.results.Series` on the run's own time axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from loadgen.errors import BadSetting, ServerUnusable
from loadgen.results import Line, Series

TIMEOUT_S: Final = 20.0
POINTS: Final = 300
"""Most points of a line."""
LINES: Final = 20
"""Most lines of a query: those with the largest values."""
_WINDOW: Final = "1m"
"""Of rates: several scrapes of the chart's PodMonitor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """``unit`` is for people: ``replicas``, ``requests``, ``s``, ``1/s``."""

    name: str
    text: str
    unit: str = ""


_COUNTED: Final = 'label_replace(max by (role, shard) (expertmesh_{0}_replicas{{MATCHERS}}), "of", "{0}", "", "")'
DEFAULT: Final = (
    Query(name="Replicas", text=f"{_COUNTED.format('wanted')} or {_COUNTED.format('ready')}", unit="replicas"),
    Query(name="Expert seats", text="max by (shard) (expertmesh_expert_seats{MATCHERS})", unit="seats"),
    Query(name="Attention workers", text="max(expertmesh_workers{MATCHERS})", unit="workers"),
    Query(name="Queue", text="max(expertmesh_queue_requests{MATCHERS})", unit="requests"),
    Query(
        name="Errors of the server",
        text=f"sum by (code) (rate(expertmesh_request_errors_total{{MATCHERS}}[{_WINDOW}]))",
        unit="1/s",
    ),
)
"""Replicas wanted and there, queue and errors; MATCHERS stands for those of the user."""


def query_of(text: str) -> Query:
    """Returns the query that an option gives as NAME=PROMQL.

    >>> query_of("GPU memory=sum(expertmesh_gpu_memory_bytes{state='used'})").name
    'GPU memory'

    Raises:
        BadSetting: it has another form.
    """
    name, _, query = text.partition("=")
    if not name.strip() or not query.strip():
        raise BadSetting(f"--query {text} has no name.", hint="Write NAME=PROMQL, such as 'Tokens=sum(rate(...[1m]))'.")
    return Query(name=name.strip(), text=query.strip())


class Prometheus:
    """The server at ``url``. ``matchers`` of labels, such as ``namespace="mesh"``, choose the release."""

    def __init__(
        self,
        url: str,
        *,
        matchers: str = "",
        more: Sequence[Query] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._transport = transport
        self._queries = [Query(name=q.name, text=q.text.replace("MATCHERS", matchers), unit=q.unit) for q in DEFAULT]
        self._queries += more

    async def check(self) -> None:
        """Asks for nothing in particular.

        Raises:
            ServerUnusable: it does not answer, or as another server does.
        """
        async with self._client() as client:
            try:
                await _asked(client, f"{self._url}/api/v1/query", {"query": "1"})
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise ServerUnusable(f"No Prometheus answers: {_said(error)}", hint="See --prometheus URL.") from error

    async def series(self, began_at: float, duration_s: float) -> list[Series]:
        """Returns all of them from ``began_at``, in Unix seconds, on. What cannot be had says why."""
        async with self._client() as client:
            return [await self._one(client, query, began_at, duration_s) for query in self._queries]

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=TIMEOUT_S, transport=self._transport)

    async def _one(self, client: httpx.AsyncClient, query: Query, began_at: float, duration_s: float) -> Series:
        step = max(1, math.ceil(duration_s / POINTS))
        asked = {"query": query.text, "start": str(began_at), "end": str(began_at + duration_s), "step": str(step)}
        try:
            answer = await _asked(client, f"{self._url}/api/v1/query_range", asked)
            lines, error = _lines(answer, began_at), None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
            lines, error = [], _said(problem)
        return Series(name=query.name, query=query.text, unit=query.unit, lines=lines, error=error)


async def _asked(client: httpx.AsyncClient, url: str, form: Mapping[str, str]) -> Any:
    """Returns the member ``data`` of an answer. Raises HTTPError, or ValueError where it is no success."""
    answer = await client.post(url, data=dict(form))
    said = answer.json() if "json" in answer.headers.get("content-type", "") else {}
    if answer.status_code != httpx.codes.OK or said.get("status") != "success":
        raise ValueError(said.get("error") or f"status {answer.status_code}")
    return said["data"]


def _lines(data: Any, began_at: float) -> list[Line]:
    found = [_line(each, began_at) for each in data["result"]]
    found = [line for line in found if line.points]
    return sorted(found, key=lambda line: max(value for _, value in line.points), reverse=True)[:LINES]


def _line(each: Any, began_at: float) -> Line:
    labels = {name: value for name, value in each["metric"].items() if name != "__name__" and value}
    points = [(round(float(at) - began_at, 3), float(value)) for at, value in each["values"]]
    return Line(label=" ".join(labels.values()), points=[point for point in points if math.isfinite(point[1])])


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
