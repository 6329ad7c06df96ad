"""A stand-in for Prometheus' HTTP API whose answers a test gives, and dashboards of a few panels."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from services.dashboards.model import Dashboard, parse

Labels = Mapping[str, str]
Found = Sequence[tuple[Labels, Sequence[tuple[float, float | str]]]]


@dataclass(kw_only=True)
class StandIn:
    """``series`` gives what a query finds: labels and points. ``values`` are those of each label. ``asked`` has the
    paths and parameters of all requests."""

    series: Callable[[str], Found]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        self.asked.append((path, query))
        name = path.removeprefix("/api/v1/")
        if name == "query_range":
            return 200, _data("matrix", [{"metric": labels, "values": _texts(at)} for labels, at in self._of(query)])
        if name == "query":
            return 200, _data("vector", [{"metric": labels, "value": _texts(at)[-1]} for labels, at in self._of(query)])
        if name == "status/config":
            return 200, {"status": "success", "data": {"yaml": "global: {scrape_interval: 2s}"}}
        if name.startswith("label/"):
            return 200, {"status": "success", "data": list(self.values.get(name.split("/")[1], ()))}
        return 404, {"status": "error", "error": "no such path"}

    def _of(self, query: Mapping[str, str]) -> Found:
        return self.series(query["query"])


def _data(kind: str, result: list[Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}}


def _texts(points: Sequence[tuple[float, float | str]]) -> list[list[Any]]:
    return [[at, str(value)] for at, value in points]


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    """Connections that come at once; beyond it a client tries again after a second."""


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    """``stand_in`` answers at its ``url``. A query that raises ValueError is one that Prometheus refuses, and
    one that raises ConnectionError finds none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            read = urlsplit(self.path)
            try:
                asked = {key: values[0] for key, values in parse_qs(read.query).items()}
                status, body = stand_in.answer(read.path, asked)
            except ConnectionError:
                self.close_connection = True
                return
            except ValueError as error:
                status, body = 400, {"status": "error", "errorType": "bad_data", "error": str(error)}
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def panel(kind: str = "timeseries", *exprs: str, legend: str = "{{role}}", **more: Any) -> dict[str, Any]:
    """A panel as its JSON has it."""
    targets = [{"expr": expr, "legendFormat": legend, "refId": "ABCDEF"[order]} for order, expr in enumerate(exprs)]
    made = {"type": kind, "title": "T", "gridPos": {"h": 8, "w": 12, "x": 0, "y": 0}, "targets": targets}
    return made | {"fieldConfig": {"defaults": {}, "overrides": []}} | more


def dashboard(*panels: dict[str, Any], variables: Sequence[dict[str, Any]] = (), **more: Any) -> Dashboard:
    """A dashboard of ``panels``."""
    made = {"title": "Board", "uid": "board", "panels": list(panels), "templating": {"list": list(variables)}} | more
    return parse(msgspec.json.encode(made))
