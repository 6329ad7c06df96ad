"""As much of the hub as a checkpoint takes to fetch, on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote


@contextmanager
def hub(name: str, commit: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """URL of a hub with one repository, whose branch ``main`` is at ``commit``."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            if path in (f"/api/models/{name}/revision/{revision}" for revision in ("main", commit)):
                content, kind = _described(name, commit, files), "application/json"
            elif path.startswith(f"/api/models/{name}/tree/{commit}"):
                content, kind = _tree(files), "application/json"
            else:
                content, kind = files.get(path.removeprefix(f"/{name}/resolve/{commit}/"), b""), "binary"
            self.send_response(200 if content else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _described(name: str, commit: str, files: Mapping[str, bytes]) -> bytes:
    siblings = [{"rfilename": file} for file in files]
    return json.dumps({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings}).encode()


def _tree(files: Mapping[str, bytes]) -> bytes:
    return json.dumps(
        [{"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for f, c in files.items()]
    ).encode()
