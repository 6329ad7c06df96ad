"""Lists and watches of workloads in one namespace, in plain dicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from services.errors import ConfigError, KubernetesUnavailable, WatchExpired
from services.kube import ACCOUNT, GROUPS_API
from services.runtime.kube_client import Answer, KubeClient, in_pod_client, pod_namespace

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient

Kind = Literal["statefulsets", "deployments", "leaderworkersets"]
Json = dict[str, Any]
WATCH_S = 30
"""The API server ends a watch after this time; the next one shows that it is still there."""
LATE_S = 10.0
"""Time limit of a connection, and of how late a watch may end."""
_APIS: Mapping[Kind, str] = {
    "statefulsets": "apps/v1",
    "deployments": "apps/v1",
    "leaderworkersets": GROUPS_API,
}
_GONE = 410


def connecting(selector: str, account: Path = ACCOUNT) -> Callable[[], Api]:
    """Make connections with this pod's service account, for workloads that ``selector`` finds.

    Raises:
        ConfigError: this is no pod, or one without a token, or the `kubernetes` package is missing.
    """
    try:
        namespace = pod_namespace(account)
        in_pod_client()
    except KubernetesUnavailable as error:
        raise ConfigError(
            error.message,
            hint="--kubernetes-selector is for pods with a service account's token; the chart sets it with "
            "autoscaling.enabled. Leave it out elsewhere.",
        ) from error
    return lambda: Api(in_pod_client(), namespace=namespace, selector=selector)


class Api:
    """A connection for one thread; only :meth:`close` may be called by another."""

    def __init__(self, client: ApiClient, *, namespace: str, selector: str) -> None:
        self._client, self._namespace, self._selector = KubeClient(client), namespace, selector

    def close(self) -> None:
        self._client.close()

    def list(self, kind: Kind) -> tuple[list[Json], str]:
        """Return the workloads of ``kind`` that the selector finds, and the version from which to watch.

        Raises:
            KubernetesUnavailable: there is no answer, or another one than asked for.
        """
        with self._answer(kind, {}) as answer:
            found = _decoded(answer.text())
            return list(found["items"]), str(found["metadata"]["resourceVersion"])

    def watch(self, kind: Kind, version: str) -> Iterator[Json]:
        """Yield the events since ``version``, until the API server ends the watch.

        Raises:
            WatchExpired: the API server does not know ``version`` any more: list again.
            KubernetesUnavailable: the connection broke, or the API server refuses.
        """
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        with self._answer(kind, asked | {"allowWatchBookmarks": "true"}) as answer:
            for line in answer.lines():
                event = _decoded(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise _refusal(int(status.get("code") or 0), str(status.get("message")))
                yield event

    @contextmanager
    def _answer(self, kind: Kind, query: dict[str, str]) -> Iterator[Answer]:
        path = f"/apis/{_APIS[kind]}/namespaces/{self._namespace}/{kind}"
        timeout_s = (LATE_S, WATCH_S + LATE_S)
        with self._client.get(path, {"labelSelector": self._selector} | query, timeout_s=timeout_s) as answer:
            if answer.status != 200:
                raise _refusal(answer.status, answer.text()[:300])
            yield answer


def _decoded(text: str | bytes) -> Json:
    try:
        found: Json = json.loads(text)
    except ValueError as error:
        raise KubernetesUnavailable(f"The answer is not that of an API server: {text[:100]!r}") from error
    return found


def _refusal(status: int, text: str) -> KubernetesUnavailable:
    if status == _GONE:
        return WatchExpired(f"The API server no longer has the version to watch from: {text}")
    hint = {
        401: "The token is refused; it is read again.",
        403: "The service account may not get, list and watch StatefulSets, Deployments and, with --layout lockstep, "
        "LeaderWorkerSets of its namespace: the chart's Role is missing.",
    }
    return KubernetesUnavailable(f"The API server answers {status}: {text}", hint=hint.get(status))
