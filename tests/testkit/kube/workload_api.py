"""A small API server over HTTP: lists and watches of the workloads of one namespace, and what goes wrong with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testkit.answering import Asked, answering, reply

Json = dict[str, Any]
LABELS = {"app.kubernetes.io/instance": "mesh"}


def stateful_set(name: str, replicas: int | None, ready: int = 0, *, role: str = "experts", shard: str = "0") -> Json:
    labels = LABELS | {"app.kubernetes.io/component": role}
    labels |= {"expertmesh.io/shard-group": shard} if role == "experts" else {}
    spec = {} if replicas is None else {"replicas": replicas}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"readyReplicas": ready}}


class ApiServer:
    """``token``: what it takes; None: anything. ``refusal``: status of every answer; ``watch_s``: after which it ends a
    watch; ``bookmarks``: whether it says then how far it came."""

    def __init__(self) -> None:
        self.version = 100
        self.forgotten = 0
        self.token: str | None = None
        self.refusal: int | None = None
        self.watch_s = 60.0
        self.bookmarks = False
        self.asked: list[str] = []
        self.watched_from: list[int] = []
        self.refused = 0
        self._objects: dict[str, dict[str, Json]] = {"statefulsets": {}, "deployments": {}, "leaderworkersets": {}}
        self._events: list[tuple[int, str, Json]] = []
        self._news = threading.Condition()
        self._cut = 0

    def put(self, kind: str, item: Json) -> None:
        known = item["metadata"]["name"] in self._objects[kind]
        self._note(kind, "MODIFIED" if known else "ADDED", item)

    def delete(self, kind: str, name: str) -> None:
        self._note(kind, "DELETED", self._objects[kind][name])

    def forget(self) -> None:
        """Watches of what came before end with an error, as after a compaction of etcd."""
        with self._news:
            self.forgotten = self.version = self.version + 1
            self._news.notify_all()

    def cut(self) -> None:
        """Breaks every watch in the middle of a line."""
        with self._news:
            self._cut += 1
            self._news.notify_all()

    def _note(self, kind: str, what: str, item: Json) -> None:
        with self._news:
            self.version += 1
            item = item | {"metadata": item["metadata"] | {"resourceVersion": str(self.version)}}
            name = item["metadata"]["name"]
            if what == "DELETED":
                del self._objects[kind][name]
            else:
                self._objects[kind][name] = item
            self._events.append((self.version, kind, {"type": what, "object": item}))
            self._news.notify_all()

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Serve while the context is open, at the address that it returns."""
        with answering(self.answer, port) as url:
            try:
                yield url
            finally:
                self.cut()

    def answer(self, handler: Asked) -> None:
        parts = urlsplit(handler.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        kind = parts.path.rsplit("/", 1)[1]
        self.asked.append(f"{'watch' if 'watch' in query else 'list'} {parts.path} {query.get('labelSelector')}")
        refusal = self.refusal
        if self.token is not None and handler.headers.get("authorization") != f"bearer {self.token}":
            refusal = 401
        if refusal is not None:
            self.refused += 1
            _send(handler, refusal, {"kind": "Status", "code": refusal, "message": "refused"})
        elif "watch" in query:
            self.watched_from.append(int(query["resourceVersion"]))
            self._watch(handler, kind, self.watched_from[-1])
        else:
            with self._news:
                body = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self._objects[kind].values())}
            _send(handler, 200, body)

    def _watch(self, handler: Asked, kind: str, since: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        cut = self._cut
        with self._news:
            while True:
                if since < self.forgotten:
                    status = {"kind": "Status", "code": 410, "message": "too old resource version"}
                    _chunk(handler, json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                    break
                new = [(version, event) for version, of, event in self._events if of == kind and version > since]
                for version, event in new:
                    since = version
                    _chunk(handler, json.dumps(event).encode() + b"\n")
                if self._cut != cut:
                    _chunk(handler, b'{"type": "MODIF')
                    handler.close_connection = True
                    return
                if not new and not self._news.wait(self.watch_s):
                    if self.bookmarks:
                        since = self.version
                        mark = {"metadata": {"resourceVersion": str(since)}}
                        _chunk(handler, json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
                    break
        _chunk(handler, b"")


def _send(handler: Asked, status: int, body: Json) -> None:
    reply(handler, status, "application/json", json.dumps(body).encode())


def _chunk(handler: Asked, data: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.flush()
