"""From a Prometheus to a page: asks for what the chosen dashboards show, and draws it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.dashboards.model import Dashboard
from services.dashboards.page import Board
from services.dashboards.prometheus import Prometheus
from services.dashboards.queries import run
from services.dashboards.times import Range, between
from services.dashboards.variables import resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is looked at: times as users write them, values of variables, and how often Prometheus scrapes (None: as it
    says)."""

    start: str = "-1h"
    end: str = "now"
    given: Mapping[str, Sequence[str]]
    scrape_s: float | None = None

    def span(self) -> Range:
        """Return the range as it is now.

        Raises:
            ConfigError: a time cannot be read.
        """
        return between(self.start, self.end, time.time())


async def board(source: Prometheus, key: str, dashboard: Dashboard, look: Look, span: Range) -> Board:
    """Return the dashboard with what its panels draw.

    Raises:
        PrometheusUnavailable: no answer.
        QueryFailed: the values of a variable were not found.
    """
    scrape_s = look.scrape_s or await source.scrape_interval_s()
    given = {name: values for name, values in look.given.items() if name in {each.name for each in dashboard.variables}}
    values = await resolve(dashboard.variables, given, source, span)
    drawings = await run(dashboard, source, values, span, scrape_s)
    return Board(key=key, dashboard=dashboard, values=values, drawings=drawings)
