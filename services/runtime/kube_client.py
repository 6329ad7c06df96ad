"""The API server of Kubernetes, for those who look and change nothing: a client of it, and a GET.

The `kubernetes` package is imported where it is used, for most processes never ask. Its generated calls and models are
not used: images leave them out (helm/images/Dockerfile).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import KubernetesUnavailable
from services.kube import ACCOUNT

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration
    from kubernetes.client.rest import RESTResponse


def in_pod_client() -> ApiClient:
    """A client with what this pod's service account has, its token read anew as it is renewed.

    Raises:
        KubernetesUnavailable: this is no pod, or one without a token.
    """
    from kubernetes.client.configuration import Configuration
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.incluster_config import load_incluster_config

    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise KubernetesUnavailable(f"There is no way to the API server of Kubernetes ({error}).") from error
    return client_of(configuration)


def client_of(configuration: Configuration) -> ApiClient:
    """One that asks once: whether to ask again is for its user to say."""
    from kubernetes.client.api_client import ApiClient

    configuration.retries = False
    return ApiClient(configuration)


def pod_namespace(account: Path = ACCOUNT) -> str:
    """Raises KubernetesUnavailable where this is no pod, or one without a token."""
    try:
        return (account / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise KubernetesUnavailable(f"The namespace of this pod cannot be read ({error}).") from error


def get(
    client: ApiClient, path: str, query: Mapping[str, str], *, accept: str, timeout_s: tuple[float, float]
) -> RESTResponse:
    """The answer, whatever its status, its body not read yet. ``timeout_s``: to connect, and between bytes.

    Raises:
        KubernetesUnavailable: there is none.
    """
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    words = client.param_serialize(
        "GET",
        path,
        query_params=list(query.items()),
        header_params={"Accept": accept},
        auth_settings=["BearerToken"],
    )
    try:
        return client.call_api(*words, _request_timeout=timeout_s)
    except (HTTPError, ApiException, OSError) as error:  # ApiException: TLS
        raise KubernetesUnavailable(f"The API server does not answer: {' '.join(str(error).split())}") from error
