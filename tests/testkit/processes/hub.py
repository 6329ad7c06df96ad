"""As much of the hub as a checkpoint takes to fetch, on loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote

from testkit.answering import Asked, answering, reply


@contextmanager
def hub(name: str, commit: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """URL of a hub with one repository, whose branch ``main`` is at ``commit``."""

    def answer(asked: Asked) -> None:
        path = unquote(asked.path.partition("?")[0])
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
