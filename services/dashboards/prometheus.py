"""Asks a Prometheus over its HTTP API. Out go queries, back come series with their labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import yaml

from services.config import mask_url
from services.dashboards.times import DEFAULT_SCRAPE_S, Range, seconds
from services.errors import ConfigError, PrometheusUnavailable, QueryFailed

_TIMEOUT_S = 30.0
_LOCAL = ("127.", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """``points`` are Unix times in seconds and values, in order; times without a sample are left out."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """``url`` is the server's root; it may have a user and a password, and a path."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            host = httpx.URL(self.url).netloc.decode()
            self._client = httpx.AsyncClient(
                base_url=self.url, timeout=_TIMEOUT_S, transport=transport, trust_env=not host.startswith(_LOCAL)
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{mask_url(url)} is no address of Prometheus: {error}.") from error

    @property
    def shown_url(self) -> str:
        """The address without its password."""
        return mask_url(self.url)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def range(self, query: str, span: Range, step_s: float) -> list[Series]:
        """Return the series that ``query`` gives at each step of ``span``.

        Raises:
            PrometheusUnavailable: no answer.
            QueryFailed: Prometheus refuses the query.
        """
        bounds = span.aligned(step_s)
        found = await self._data(
            "query_range", query=query, start=str(bounds.start_s), end=str(bounds.end_s), step=str(step_s)
        )
        return [Series(labels=each["metric"], points=_points(each["values"])) for each in _of(found, "matrix")]

    async def instant(self, query: str, at_s: float) -> list[Series]:
        """Return the series that ``query`` gives at ``at_s``, with a point each. Raises as :meth:`range` does."""
        found = await self._data("query", query=query, time=str(at_s))
        if isinstance(found, dict) and found.get("resultType") == "scalar":
            return [Series(labels={}, points=_points([found["result"]]))]
        return [Series(labels=each["metric"], points=_points([each["value"]])) for each in _of(found, "vector")]

    async def label_values(self, label: str, match: str | None, span: Range) -> list[str]:
        """Return the values that ``label`` has in series that ``match`` selects. Raises as :meth:`range` does."""
        parameters = {"start": str(span.start_s), "end": str(span.end_s)} | ({"match[]": match} if match else {})
        found = await self._data(f"label/{label}/values", **parameters)
        return [str(value) for value in found]

    async def scrape_interval_s(self) -> float:
        """Return how often it scrapes by its configuration; Grafana's assumption where it does not show that.

        Raises:
            PrometheusUnavailable: no answer.
        """
        try:
            read = yaml.safe_load((await self._data("status/config"))["yaml"])
            return seconds(str(read["global"]["scrape_interval"]))
        except (QueryFailed, ConfigError, yaml.YAMLError, KeyError, TypeError):
            return DEFAULT_SCRAPE_S

    async def _data(self, path: str, **parameters: str) -> Any:
        try:
            response = await self._client.get(f"/api/v1/{path}", params=parameters)
            answer = response.json()
        except httpx.HTTPError as error:
            said = str(error).rstrip(".") or type(error).__name__
            raise PrometheusUnavailable(f"Prometheus at {self.shown_url} does not answer: {said}.") from error
        except json.JSONDecodeError as error:
            raise PrometheusUnavailable(
                f"{self.shown_url} answers {response.status_code}, and not as Prometheus does.",
                hint="Give the address that has /api/v1/query below it.",
            ) from error
        if not isinstance(answer, dict) or answer.get("status") != "success":
            said = str(answer.get("error", answer)) if isinstance(answer, dict) else str(answer)
            raise QueryFailed(said)
        return answer.get("data")


def _of(found: Any, kind: str) -> list[Any]:
    if not isinstance(found, dict) or found.get("resultType") != kind:
        raise QueryFailed(f"The query gives a {found.get('resultType') if isinstance(found, dict) else 'list'}.")
    return list(found["result"])


def _points(values: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    return [(float(at), float(value)) for at, value in values]
