"""As much of the hub as a checkpoint takes to fetch, on loopback."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote

from testkit.answering import Asked, answering, reply

_REASONS = {"401": "RepoNotFound", "403": "GatedRepo", "404": "RevisionNotFound"}


@contextmanager
def hub(name: str, commit: str, files: Mapping[str, bytes], asked_for: list[str] | None = None) -> Iterator[str]:
    """URL of a hub with one repository, whose branch ``main`` is at ``commit``. Other repositories are refused with the
    status that their name ends with. The paths of requests are added to ``asked_for``."""

    def answer(asked: Asked) -> None:
        path = unquote(asked.path.partition("?")[0])
        if asked_for is not None:
            asked_for.append(path)
        if refused := re.match(r"/api/models/org/.*-(401|403|404|500)(?:/|$)", path):
            reply(asked, int(refused[1]), "text/plain", b"no", X_Error_Code=_REASONS.get(refused[1], "Broken"))
            return
        if path in (f"/api/models/{name}/revision/{revision}" for revision in ("main", commit)):
            content, kind = _described(name, commit, files), "application/json"
        elif path.startswith(f"/api/models/{name}/tree/{commit}"):
            content, kind = _tree(files), "application/json"
        else:
            content, kind = files.get(path.removeprefix(f"/{name}/resolve/{commit}/"), b""), "binary"
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": commit}
        reply(asked, 200 if content else 404, kind, content, **headers)

    with answering(answer) as url:
        yield url


def _described(name: str, commit: str, files: Mapping[str, bytes]) -> bytes:
    siblings = [{"rfilename": file} for file in files]
    return json.dumps({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings}).encode()


def _tree(files: Mapping[str, bytes]) -> bytes:
    return json.dumps(
        [{"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for f, c in files.items()]
    ).encode()
