"""The pages of `observe`: a list of the dashboards, and each of them drawn when it is asked for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from services.dashboards.draw.html import Html, element, join
from services.dashboards.model import Dashboard
from services.dashboards.page import Frame, document, page
from services.dashboards.prometheus import Prometheus
from services.dashboards.render import Look, board
from services.errors import ConfigError, ExpertMeshError

REFRESH_S = 10.0
_SPANS = ("5m", "15m", "1h", "6h", "24h")
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Answers with ``dashboards``, drawn from ``source``. ``notes``: what the first page says below them."""

    source: Prometheus
    dashboards: Mapping[str, Dashboard]
    notes: tuple[Html, ...]

    def app(self) -> Starlette:
        """Return the application. It answers to names of this machine alone, so that no web page of another host can
        read it under a name of its own."""
        routes = [Route("/", self.first), Route("/{key}", self.one)]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(_LOCAL), www_redirect=False)
        return Starlette(routes=routes, middleware=[hosts])

    async def first(self, _request: Request) -> HTMLResponse:
        """Answer with the list of dashboards."""
        items = [
            element(
                "li",
                element("a", each.short_title, href=f"/{key}"),
                *([f": {each.description}"] if each.description else []),
            )
            for key, each in self.dashboards.items()
        ]
        head = element("header", element("h1", "expertmesh on this machine"))
        return HTMLResponse(document("expertmesh", head, element("ul", *items), *self.notes))

    async def one(self, request: Request) -> HTMLResponse:
        """Answer with a dashboard. The query has Grafana's words: ``from``, ``to``, ``var-NAME``, ``refresh``."""
        key, asked = request.path_params["key"], request.query_params
        if key not in self.dashboards:
            return self._refusal("There is no such dashboard.", 404)
        try:
            look = _look(asked)
            drawn = await board(self.source, key, self.dashboards[key], look, span := look.span())
        except ConfigError as error:
            return self._refusal(error.message, 400)
        except ExpertMeshError as error:
            return self._refusal(error.message, 503)
        links = [("All", "/"), *((each.short_title, f"/{other}?{asked}") for other, each in self.dashboards.items())]
        spans = [(f"Last {span}", f"/{key}?{_with_span(asked, span)}") for span in _SPANS]
        refresh_s = None if asked.get("refresh") == "off" else REFRESH_S
        frame = Frame(source=self.source.shown_url, span=span, refresh_s=refresh_s, links=[*links, *spans])
        return HTMLResponse(page([drawn], frame))

    def _refusal(self, reason: str, status: int) -> HTMLResponse:
        refresh_s = REFRESH_S if status == 503 else None
        body = join([element("p", reason), element("p", element("a", "All dashboards", href="/"))])
        return HTMLResponse(document("expertmesh", body, refresh_s=refresh_s), status_code=status)


def _look(asked: QueryParams) -> Look:
    values: dict[str, list[str]] = {}
    for name, value in asked.multi_items():
        if name.startswith("var-"):
            values.setdefault(name.removeprefix("var-"), []).append(value)
    return Look(start=asked.get("from", "-15m"), end=asked.get("to", "now"), given=values)


def _with_span(asked: QueryParams, span: str) -> str:
    kept = [(name, value) for name, value in asked.multi_items() if name not in ("from", "to")]
    return urlencode([*kept, ("from", f"-{span}")])


class Server(uvicorn.Server):
    """uvicorn on a bound socket; signals are this process's own."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_config=None, log_level="warning")
        )
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def run_here(self) -> None:
        """Serve until it is cancelled."""
        await self.serve(sockets=[self._listener])
