"""A release as the API server has it: lists of its objects, by plain GETs. Nothing is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.errors import KubernetesForbidden, KubernetesUnavailable
from services.kube import ACCOUNT, GROUP_OF, GROUPS_API, INSTANCE, NAME, ROLE
from services.runtime.kube_client import KubeClient, client_of, in_pod_client, kubernetes_extra, pod_namespace
from services.status.fetch import FETCH
from services.status.reasons import Object
from services.status.release import SERVING, Pod, Release, release, releases

_TIMEOUT_S = (5.0, 5.0)
_HTTP_OK, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 200, 403, 404, 503
_OURS = f"{INSTANCE},{NAME},{ROLE}"
"""Selector of the objects of all releases."""
_GROUPS = "leaderworkersets"


class ClusterReader:
    """Looks at a release in ``namespace``: ``name``, or that of ``pod``, or the only one."""

    def __init__(self, client: KubeClient, namespace: str, name: str | None = None, pod: str = "") -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._pod = pod

    def read(self) -> Release:
        """Return the release, without what the account may not list: that of a scheduler may not list pods.

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
        """Return what a role that is not ready waits for, by its own page; empty where the page cannot be read."""
        port = "8000" if pod.role == "gateway" else "9100"
        status, text = self._get("api/v1", f"pods/{pod.name}:{port}/proxy/ready", {})
        try:
            said = json.loads(text)
        except ValueError:  # a worker's page is plain text
            return text.strip() if status == _UNAVAILABLE else ""
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
        """Return StatefulSets except those that the controller made of a LeaderWorkerSet: they may carry its labels."""
        found = self._list("apis/apps/v1", "statefulsets")
        return [each for each in found if GROUP_OF not in each["metadata"]["labels"]]

    def _groups(self, hidden: dict[str, str]) -> list[Object]:
        """Return the LeaderWorkerSets; none where the cluster does not know the kind."""
        return self._allowed(f"apis/{GROUPS_API}", _GROUPS, hidden, may_lack=True)

    def _allowed(
        self, api: str, kind: str, hidden: dict[str, str], selector: str = _OURS, *, may_lack: bool = False
    ) -> list[Object]:
        """Return the objects, or none where the account may not list them: then ``hidden`` has the reason."""
        try:
            return self._list(api, kind, selector, may_lack=may_lack)
        except KubernetesForbidden as error:
            hidden[kind] = error.message
            return []

    def _list(self, api: str, kind: str, selector: str = _OURS, *, may_lack: bool = False) -> list[Object]:
        """Return the objects of roles on a request's path, and of what fetches the model. ``may_lack``: the kind may be
        unknown.

        Raises:
            KubernetesForbidden: the account may not list them.
            KubernetesUnavailable: there is no answer, or another one than asked for.
        """
        status, text = self._get(api, kind, {"labelSelector": selector})
        if may_lack and status == _NOT_FOUND:
            return []
        if status != _HTTP_OK:
            error = KubernetesForbidden if status == _FORBIDDEN else KubernetesUnavailable
            raise error(f"The API server refuses {kind}: {_message(status, text)}")
        items: list[Object] = json.loads(text)["items"]
        return [each for each in items if each["metadata"]["labels"].get(ROLE) in (*SERVING, FETCH)]

    def _warnings(self) -> list[Object]:
        """Return warnings about all objects. They only add to the reasons: none where the account may not see them."""
        status, text = self._get("api/v1", "events", {"fieldSelector": "type=Warning"})
        found: list[Object] = json.loads(text)["items"] if status == _HTTP_OK else []
        return found

    def _scaled(self, selector: str) -> bool | None:
        """Return whether the release has ScaledObjects. None: the account may not know."""
        status, text = self._get("apis/keda.sh/v1alpha1", "scaledobjects", {"labelSelector": selector})
        return None if status == _FORBIDDEN else status == _HTTP_OK and bool(json.loads(text)["items"])

    def _get(self, api: str, what: str, query: dict[str, str]) -> tuple[int, str]:
        """Return status and text of an answer of the API server or a pod behind it. Raises KubernetesUnavailable."""
        path, accept = f"/{api}/namespaces/{self._namespace}/{what}", "application/json, text/plain"
        with self._client.get(path, query, timeout_s=_TIMEOUT_S, accept=accept) as answer:
            return answer.status, answer.text()


def _message(status: int, text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status} {text[:200]}"


def in_cluster() -> bool:
    """Return whether this process runs in a pod with an account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT / "token").exists()


def _kubeconfig() -> str:
    """Return the path of the kubeconfig, or several of them, as kubectl reads them."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")


def has_kubeconfig() -> bool:
    """Return whether there is a kubeconfig where kubectl would look."""
    return any(Path(name).expanduser().is_file() for name in _kubeconfig().split(os.pathsep) if name)


def connected(context: str | None) -> tuple[KubeClient, str]:
    """Return a client with this pod's account, or the kubeconfig's, and the namespace that goes with it.

    Raises:
        KubernetesUnavailable: the package is missing, or the configuration is unusable.
    """
    if context is None and in_cluster():
        return KubeClient(in_pod_client()), pod_namespace()
    with kubernetes_extra():
        from kubernetes.client.configuration import Configuration
        from kubernetes.config import ConfigException, list_kube_config_contexts
        from kubernetes.config import load_kube_config as load
    settings, file = Configuration(), _kubeconfig()
    try:
        load(file, context=context, client_configuration=settings)  # type: ignore[no-untyped-call]
        contexts, active = list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        named = [each for each in contexts if each["name"] == context] if context else [active]
        namespace = str(named[0]["context"].get("namespace") or "default")
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise KubernetesUnavailable(f"The kubeconfig is unusable: {error}") from error
    return KubeClient(client_of(settings)), namespace
