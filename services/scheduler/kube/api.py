"""The API server as the scheduler asks it: lists and watches of workloads in one namespace, in plain dicts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from services.errors import ConfigError, KubernetesUnavailable, WatchExpired
from services.kube import ACCOUNT, GROUPS_API
from services.runtime.kube_client import get, in_pod_client, pod_namespace

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.rest import RESTResponse

Kind = Literal["statefulsets", "deployments", "leaderworkersets"]
Json = dict[str, Any]
WATCH_S = 30
"""After this the API server ends a watch, and the next one says that it is still there."""
LATE_S = 10.0
"""A connection takes no longer; nor is the end of a watch later by more than this."""
_APIS: Mapping[Kind, str] = {
    "statefulsets": "apps/v1",
    "deployments": "apps/v1",
    "leaderworkersets": GROUPS_API,
}
_GONE = 410


def connect_in_cluster() -> ApiClient:
    """A client with what this pod's service account has.

    Raises:
        ConfigError: this is no pod, or one without a token.
    """
    with _needed():
        return in_pod_client()


def own_namespace(account: Path = ACCOUNT) -> str:
    """Raises ConfigError where this is no pod, or one without a token."""
    with _needed():
        return pod_namespace(account)


@contextmanager
def _needed() -> Iterator[None]:
    try:
        yield
    except KubernetesUnavailable as error:
        raise ConfigError(
            error.message,
            hint="--kubernetes on is for pods with a service account's token; the chart sets it with "
            "autoscaling.enabled. Leave it off elsewhere.",
        ) from error


class Api:
    """One connection at a time; used by one thread, but for :meth:`close`."""

    def __init__(self, client: ApiClient, *, namespace: str, selector: str) -> None:
        self._client, self._namespace, self._selector = client, namespace, selector
        self._open: RESTResponse | None = None
        self._closed = False

    def list(self, kind: Kind) -> tuple[list[Json], str]:
        """All of ``kind`` that the selector finds, and the version from which to watch.

        Raises:
            KubernetesUnavailable: no answer, or another than asked for.
        """
        with self._answer(kind, {}) as answer:
            found = _decoded(answer.read_all())
            return list(found["items"]), str(found["metadata"]["resourceVersion"])

    def watch(self, kind: Kind, version: str) -> Iterator[Json]:
        """Events since ``version``, until the API server ends the watch.

        Raises:
            WatchExpired: it does not know ``version`` any more: list anew.
            KubernetesUnavailable: the connection broke, or it refuses.
        """
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        with self._answer(kind, asked | {"allowWatchBookmarks": "true"}) as answer:
            for line in answer.lines():
                event = _decoded(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise _refusal(int(status.get("code") or 0), str(status.get("message")))
                yield event

    def close(self) -> None:
        """Ends what another thread waits for, or is about to."""
        self._closed = True
        response = self._open
        connection = getattr(response.response, "connection", None) if response else None
        if (sock := getattr(connection, "sock", None)) is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def _answer(self, kind: Kind, query: dict[str, str]) -> _Answer:
        self._open = get(
            self._client,
            f"/apis/{_APIS[kind]}/namespaces/{self._namespace}/{kind}",
            {"labelSelector": self._selector} | query,
            accept="application/json",
            timeout_s=(LATE_S, WATCH_S + LATE_S),
        )
        if self._closed:  # before there was anything to end
            self._open.response.close()
            raise KubernetesUnavailable("The connection to the API server was closed here.")
        return _Answer(self._open)


class _Answer:
    """A response under way; its errors are ours."""

    def __init__(self, response: RESTResponse) -> None:
        self._response = response

    def __enter__(self) -> _Answer:
        if self._response.status != 200:
            text = self.read_all().decode(errors="replace")[:300]
            self._response.response.close()
            raise _refusal(self._response.status, text)
        return self

    def __exit__(self, *_: object) -> None:
        self._response.response.close()

    def read_all(self) -> bytes:
        return b"".join(self._pieces())

    def lines(self) -> Iterator[bytes]:
        """Whole ones: what a broken connection cut off is not one."""
        rest = b""
        for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            yield from filter(None, whole)

    def _pieces(self) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError

        try:
            yield from self._response.response.stream(amt=None, decode_content=True)
        except (HTTPError, OSError) as error:
            raise KubernetesUnavailable(f"The API server broke off: {error}") from error


def _decoded(text: bytes) -> Json:
    try:
        found: Json = json.loads(text)
    except ValueError as error:
        raise KubernetesUnavailable(f"What answers is no API server: {text[:100]!r}") from error
    return found


def _refusal(status: int, text: str) -> KubernetesUnavailable:
    if status == _GONE:
        return WatchExpired(f"The API server has forgotten what came since: {text}")
    hint = {
        401: "The token is refused; it is read anew.",
        403: "The service account may not get, list and watch StatefulSets, Deployments and, with --layout lockstep, "
        "LeaderWorkerSets of its namespace: the chart's Role is missing.",
    }
    return KubernetesUnavailable(f"The API server answers {status}: {text}", hint=hint.get(status))
