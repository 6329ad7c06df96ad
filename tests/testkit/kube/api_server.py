"""An API server's lists over HTTP, from objects in a dict: what `expertmesh status` reads, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testkit.answering import Asked, answering, reply

TOKEN = "a-token"
Object = dict[str, Any]


def labels(role: str, group: int | None = None, release: str = "mesh") -> dict[str, str]:
    found = {"app.kubernetes.io/name": "expertmesh", "app.kubernetes.io/instance": release}
    found["app.kubernetes.io/component"] = role
    return found | ({} if group is None else {"expertmesh.io/shard-group": str(group)})


def workload(role: str, wanted: int, ready: int, group: int | None = None, **more: Any) -> Object:
    name = f"mesh-{role}" if group is None else f"mesh-{role}-{group}"
    status = {"replicas": wanted, "readyReplicas": ready, "updatedReplicas": wanted} | more
    meta = {"name": name, "uid": f"w-{name}", "labels": labels(role, group)}
    return {"metadata": meta, "spec": {"replicas": wanted}, "status": status}


def pod(name: str, role: str, group: int | None = None, ready: bool = True, **status: Any) -> Object:
    meta = {"name": name, "uid": f"p-{name}", "labels": labels(role, group)}
    conditions = [{"type": "Ready", "status": str(ready)}, *status.pop("conditions", [])]
    return {"metadata": meta, "status": {"phase": "Running", "conditions": conditions} | status}


@dataclass
class ApiServer:
    """``lists``: kind (its last part of the path) -> objects. ``pages``: path of a pod's page behind it -> status and
    text. ``forbidden``: kinds that the account may not list."""

    url: str = ""
    lists: dict[str, list[Object]] = field(default_factory=dict)
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)

    def kubeconfig(self, folder: Path, namespace: str | None = None) -> Path:
        context = {"cluster": "stand-in", "user": "me"} | ({"namespace": namespace} if namespace else {})
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "stand-in", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": context}],
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(content))
        return file

    def answer(self, target: str, authorization: str | None) -> tuple[int, str, str]:
        """Status, content type and body."""
        if authorization != f"Bearer {TOKEN}":
            return 401, "application/json", json.dumps({"kind": "Status", "message": "Unauthorized"})
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if path in self.pages:
            status, text = self.pages[path]
            return status, "text/plain", text
        kind = path.rpartition("/")[2]
        if kind in self.forbidden:
            return 403, "application/json", json.dumps({"kind": "Status", "message": f"{kind} is forbidden"})
        if kind not in self.lists:
            return 404, "application/json", json.dumps({"kind": "Status", "message": "not found"})
        namespace = path.split("/namespaces/")[1].split("/")[0]
        found = [each for each in self.lists[kind] if _matches(each, namespace, query.get("labelSelector", [""])[0])]
        return 200, "application/json", json.dumps({"kind": "List", "items": found})


def _matches(item: Object, namespace: str, selector: str) -> bool:
    labels: Mapping[str, str] = item["metadata"].get("labels", {})
    if item["metadata"].get("namespace", "default") != namespace:
        return False
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


@contextmanager
def running_api_server() -> Iterator[ApiServer]:
    api = ApiServer()

    def answer(asked: Asked) -> None:
        status, kind, text = api.answer(asked.path, asked.headers.get("authorization"))
        reply(asked, status, kind, text.encode())

    with answering(answer) as api.url:
        yield api
