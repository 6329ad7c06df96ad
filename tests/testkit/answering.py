"""An HTTP server of one test's own, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Asked = BaseHTTPRequestHandler
"""A request, and the way to its answer."""


@contextmanager
def answering(answer: Callable[[Asked], None], port: int = 0) -> Iterator[str]:
    """Where each GET, HEAD and POST is given to ``answer``, on a thread of its own. Nothing is logged."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def reply(asked: Asked, status: int, kind: str, body: bytes, **headers: str) -> None:
    """``kind``: of the content. Other headers by their names, with _ for -."""
    asked.send_response(status)
    asked.send_header("Content-Type", kind)
    asked.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        asked.send_header(name.replace("_", "-"), value)
    asked.end_headers()
    if asked.command != "HEAD":
        asked.wfile.write(body)
