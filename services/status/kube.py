"""The API server's word on a release: lists of its objects, by plain GETs. Nothing is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import KubernetesForbidden, KubernetesUnavailable
from services.kube import ACCOUNT, GROUP_OF, GROUPS_API, INSTANCE, NAME, ROLE
from services.runtime.kube_client import client_of, get, in_pod_client, pod_namespace
from services.status.fetch import FETCH
from services.status.reasons import Object
from services.status.release import SERVING, Pod, Release, release, releases

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient

_TIMEOUT_S = 5.0
_HTTP_OK, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 200, 403, 404, 503
_OURS = f"{INSTANCE},{NAME},{ROLE}"
"""Of all releases."""
_GROUPS = "leaderworkersets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer of the API server, or of a pod behind it."""

    status: int
    text: str


Get = Callable[[str, dict[str, str]], Answer]
"""Path and query to an answer. Raises KubernetesUnavailable."""


class ClusterReader:
    """Looks at the releases of ``namespace``. ``name``: which one, where there are several; else that of ``pod``."""

    def __init__(self, get: Get, namespace: str, name: str | None = None, pod: str = "") -> None:
        self._get = get
        self._namespace = namespace
        self._name = name
        self._pod = pod

    def read(self) -> Release:
        """Without what the account may not list, as that of a scheduler may not list pods.

        Raises:
            KubernetesUnavailable: the API server does not answer or refuses, or knows no release.
        """
        hidden: dict[str, str] = {}
        made = [*self._list("apis/apps/v1", "deployments"), *self._stateful_sets(), *self._groups(hidden)]
        name = self._chosen(releases(made), releases(each for each in made if self._is_mine(each)))
        ours = f"{INSTANCE}={name}"
        workloads = [each for each in made if each["metadata"]["labels"][INSTANCE] == name]
        if any(each["metadata"]["labels"][ROLE] == "attention" for each in workloads):
            hidden.pop(_GROUPS, None)  # a release has its attention workers in one kind of workload
        found = release(
            name,
            self._namespace,
            workloads=workloads,
            pods=self._allowed("api/v1", "pods", hidden, ours),
            jobs=self._allowed("apis/batch/v1", "jobs", hidden, ours),
            events=self._warnings(),
            scaled=self._scaled(ours),
        )
        return replace(found, hidden=hidden)

    def ready_page(self, pod: Pod) -> str:
        """What a role that is not ready says that it waits for; empty where it cannot be asked."""
        port = "8000" if pod.role == "gateway" else "9100"
        answer = self._get(f"api/v1/namespaces/{self._namespace}/pods/{pod.name}:{port}/proxy/ready", {})
        try:
            said = json.loads(answer.text)
        except ValueError:  # a worker's page is plain text
            return answer.text.strip() if answer.status == _UNAVAILABLE else ""
        # The API server's own word, where it may not or cannot reach the pod, is a Status.
        return str(said["error"]["message"]) if "error" in said else ""

    def _is_mine(self, workload: Object) -> bool:
        return self._pod.startswith(f"{workload['metadata']['name']}-")

    def _chosen(self, names: Sequence[str], mine: Sequence[str]) -> str:
        if self._name is not None:
            if self._name in names:
                return self._name
            raise KubernetesUnavailable(
                f"Namespace {self._namespace} has no release {self._name} of expertmesh.",
                hint=f"It has {', '.join(names)}." if names else "It has none.",
            )
        if len(names) != 1 and len(mine) == 1:
            return mine[0]
        if len(names) != 1:
            found = f"has the releases {', '.join(names)}" if names else "has no release of expertmesh"
            hint = "Choose one with --release." if names else "Name another with --kube-namespace."
            raise KubernetesUnavailable(f"Namespace {self._namespace} {found}.", hint=hint)
        return names[0]

    def _stateful_sets(self) -> list[Object]:
        """Without those that a LeaderWorkerSet makes of itself: they may carry its labels."""
        found = self._list("apis/apps/v1", "statefulsets")
        return [each for each in found if GROUP_OF not in each["metadata"]["labels"]]

    def _groups(self, hidden: dict[str, str]) -> list[Object]:
        """LeaderWorkerSets; none where the cluster does not know what that is."""
        return self._allowed(f"apis/{GROUPS_API}", _GROUPS, hidden, may_lack=True)

    def _allowed(
        self, api: str, kind: str, hidden: dict[str, str], selector: str = _OURS, *, may_lack: bool = False
    ) -> list[Object]:
        """Nothing where the account may not list them: then ``hidden`` has the reason."""
        try:
            return self._list(api, kind, selector, may_lack=may_lack)
        except KubernetesForbidden as error:
            hidden[kind] = error.message
            return []

    def _list(self, api: str, kind: str, selector: str = _OURS, *, may_lack: bool = False) -> list[Object]:
        """Those on a request's path, and those that fetch the model. ``may_lack``: a cluster need not have such a kind.

        Raises:
            KubernetesForbidden: the account may not list them.
            KubernetesUnavailable: no answer, or another than asked for.
        """
        path = f"{api}/namespaces/{self._namespace}/{kind}"
        answer = self._get(path, {"labelSelector": selector})
        if may_lack and answer.status == _NOT_FOUND:
            return []
        if answer.status != _HTTP_OK:
            error = KubernetesForbidden if answer.status == _FORBIDDEN else KubernetesUnavailable
            raise error(f"The API server refuses {kind}: {_message(answer)}")
        items: list[Object] = json.loads(answer.text)["items"]
        return [each for each in items if each["metadata"]["labels"].get(ROLE) in (*SERVING, FETCH)]

    def _warnings(self) -> list[Object]:
        """Of all objects there; none where the account may not see them, for they only add to the reasons."""
        path = f"api/v1/namespaces/{self._namespace}/events"
        answer = self._get(path, {"fieldSelector": "type=Warning"})
        found: list[Object] = json.loads(answer.text)["items"] if answer.status == _HTTP_OK else []
        return found

    def _scaled(self, selector: str) -> bool | None:
        """Whether it has ScaledObjects; None where the account may not know."""
        answer = self._get(
            f"apis/keda.sh/v1alpha1/namespaces/{self._namespace}/scaledobjects", {"labelSelector": selector}
        )
        if answer.status == _FORBIDDEN:
            return None
        return answer.status == _HTTP_OK and bool(json.loads(answer.text)["items"])


def _message(answer: Answer) -> str:
    try:
        return str(json.loads(answer.text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} {answer.text[:200]}"


def in_cluster() -> bool:
    """Whether this process runs in a pod with an account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT / "token").exists()


def _kubeconfig() -> str:
    """One path or several, as kubectl reads them."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")


def has_kubeconfig() -> bool:
    """Whether there is one where kubectl would look."""
    return any(Path(name).expanduser().is_file() for name in _kubeconfig().split(os.pathsep) if name)


def connected(context: str | None) -> tuple[Get, str]:
    """Requests with this pod's account, or as the kubeconfig says; and the namespace that goes with it.

    Raises:
        KubernetesUnavailable: the package is missing, or the configuration is unusable.
    """
    if context is None and in_cluster():
        return _getter(in_pod_client()), pod_namespace()
    try:
        from kubernetes.client.configuration import Configuration
        from kubernetes.config import ConfigException, list_kube_config_contexts
        from kubernetes.config import load_kube_config as load
    except ImportError as error:
        raise KubernetesUnavailable(f"{error.name} is missing.", hint="Install the package `kubernetes`.") from error
    settings, file = Configuration(), _kubeconfig()
    try:
        load(file, context=context, client_configuration=settings)  # type: ignore[no-untyped-call]
        contexts, active = list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        named = [each for each in contexts if each["name"] == context] if context else [active]
        namespace = str(named[0]["context"].get("namespace") or "default")
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise KubernetesUnavailable(f"The kubeconfig is unusable: {error}") from error
    return _getter(client_of(settings)), namespace


def _getter(client: ApiClient) -> Get:
    from urllib3.exceptions import HTTPError

    def ask(path: str, query: dict[str, str]) -> Answer:
        accept = "application/json, text/plain"
        response = get(client, f"/{path}", query, accept=accept, timeout_s=(_TIMEOUT_S, _TIMEOUT_S))
        try:
            body: bytes = response.read()  # type: ignore[no-untyped-call]
        except (HTTPError, OSError) as error:
            raise KubernetesUnavailable(f"The API server broke off: {error}") from error
        return Answer(status=response.status, text=body.decode("utf-8", errors="replace"))

    return ask
