"""The API server's word on a release: lists of its objects, by plain GETs. Nothing is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.errors import KubernetesForbidden, KubernetesUnavailable
from services.kube import ACCOUNT, INSTANCE, NAME, ROLE
from services.status.release import SERVING, Object, Pod, Release, release, releases

_TIMEOUT_S = 5.0
_HTTP_OK, _FORBIDDEN, _UNAVAILABLE = 200, 403, 503


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
        """Without pods where the account may not list them, as that of a scheduler.

        Raises:
            KubernetesUnavailable: the API server does not answer or refuses, or knows no release.
        """
        made = [*self._list("apis/apps/v1", "deployments"), *self._list("apis/apps/v1", "statefulsets")]
        name = self._chosen(releases(made), releases(each for each in made if self._is_mine(each)))
        ours = {"labelSelector": f"{INSTANCE}={name}"}
        try:
            pods, blind = self._list("api/v1", "pods", **ours), ""
        except KubernetesForbidden as error:
            pods, blind = [], error.message
        found = release(
            name,
            self._namespace,
            workloads=[each for each in made if each["metadata"]["labels"][INSTANCE] == name],
            pods=pods,
            events=self._warnings(),
            scaled=self._scaled(**ours),
        )
        return replace(found, blind=blind)

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

    def _list(self, api: str, kind: str, **query: str) -> list[Object]:
        """Without a selector: all that carry a role of ours. Raises KubernetesUnavailable."""
        path = f"{api}/namespaces/{self._namespace}/{kind}"
        answer = self._get(path, query or {"labelSelector": f"{INSTANCE},{NAME},{ROLE}"})
        if answer.status != _HTTP_OK:
            error = KubernetesForbidden if answer.status == _FORBIDDEN else KubernetesUnavailable
            raise error(f"The API server refuses {kind}: {_message(answer)}")
        items: list[Object] = json.loads(answer.text)["items"]
        return [each for each in items if each["metadata"]["labels"].get(ROLE) in SERVING]

    def _warnings(self) -> list[Object]:
        """Of all objects there; none where the account may not see them, for they only add to the reasons."""
        path = f"api/v1/namespaces/{self._namespace}/events"
        answer = self._get(path, {"fieldSelector": "type=Warning"})
        found: list[Object] = json.loads(answer.text)["items"] if answer.status == _HTTP_OK else []
        return found

    def _scaled(self, **query: str) -> bool | None:
        """Whether it has ScaledObjects; None where the account may not know."""
        answer = self._get(f"apis/keda.sh/v1alpha1/namespaces/{self._namespace}/scaledobjects", query)
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
    try:
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config import ConfigException, list_kube_config_contexts, load_incluster_config
        from kubernetes.config import load_kube_config as load
    except ImportError as error:
        raise KubernetesUnavailable(f"{error.name} is missing.", hint="Install the package `kubernetes`.") from error
    settings, file = Configuration(), _kubeconfig()
    try:
        if context is None and in_cluster():
            load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        else:
            load(file, context=context, client_configuration=settings)  # type: ignore[no-untyped-call]
            contexts, active = list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
            named = [each for each in contexts if each["name"] == context] if context else [active]
            namespace = str(named[0]["context"].get("namespace") or "default")
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise KubernetesUnavailable(f"The kubeconfig is unusable: {error}") from error
    settings.retries = False
    return _getter(ApiClient(settings)), namespace


def _getter(client: Any) -> Get:
    from urllib3.exceptions import HTTPError

    def get(path: str, query: dict[str, str]) -> Answer:
        request = client.param_serialize(
            "GET",
            f"/{path}",
            query_params=list(query.items()),
            header_params={"Accept": "application/json, text/plain"},
            auth_settings=["BearerToken"],
        )
        try:
            response = client.call_api(*request, _request_timeout=(_TIMEOUT_S, _TIMEOUT_S))
            return Answer(status=response.status, text=response.read().decode("utf-8", errors="replace"))
        except (HTTPError, OSError) as error:
            raise KubernetesUnavailable(f"The API server does not answer: {error}") from error

    return get
