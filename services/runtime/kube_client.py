"""The API server of Kubernetes, for processes that read and change nothing: clients of it, and their GETs.

The `kubernetes` package is an extra and imported where it is used: most processes never ask. Its generated calls and
models are not used; images leave them out (helm/images/Dockerfile).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import KubernetesUnavailable
from services.kube import ACCOUNT

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration
    from kubernetes.client.rest import RESTResponse


class KubeClient:
    """Sends one GET at a time. One thread uses it; only :meth:`close` may be called by another."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._response: RESTResponse | None = None
        self._closed = False

    def get(
        self, path: str, query: Mapping[str, str], *, timeout_s: tuple[float, float], accept: str = "application/json"
    ) -> Answer:
        """Return the answer, whatever its status, its body not read yet. ``timeout_s``: to connect, and between bytes.

        Raises:
            KubernetesUnavailable: there is no answer, or the client was closed.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        words = self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": accept},
            auth_settings=["BearerToken"],
        )
        try:
            self._response = self._client.call_api(*words, _request_timeout=timeout_s)
        except (HTTPError, ApiException, OSError) as error:  # ApiException: TLS
            raise KubernetesUnavailable(f"The API server does not answer: {' '.join(str(error).split())}") from error
        if self._closed:  # before there was anything to end
            self._response.response.close()
            raise KubernetesUnavailable("The connection to the API server was closed here.")
        return Answer(self._response)

    def close(self) -> None:
        """End the answer that another thread reads, or is about to read."""
        self._closed = True
        connection = getattr(self._response.response, "connection", None) if self._response else None
        if (sock := getattr(connection, "sock", None)) is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)


class Answer:
    """An answer whose body is read once, as a whole or by lines. The end of its context closes it."""

    def __init__(self, response: RESTResponse) -> None:
        self._response = response
        self.status: int = response.status

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.response.close()

    def text(self) -> str:
        return b"".join(self._pieces()).decode("utf-8", errors="replace")

    def lines(self) -> Iterator[bytes]:
        """Yield whole lines: the rest of one that a broken connection cut off is dropped."""
        rest = b""
        for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            yield from filter(None, whole)

    def _pieces(self) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError

        try:
            yield from self._response.response.stream(amt=None, decode_content=True)
        except (HTTPError, OSError) as error:
            raise KubernetesUnavailable(f"The API server closed the connection: {error}") from error


@contextmanager
def kubernetes_extra() -> Iterator[None]:
    """Turn an import of the `kubernetes` package that fails into KubernetesUnavailable, which says what to install."""
    try:
        yield
    except ImportError as error:
        raise KubernetesUnavailable(
            f"The Python package {error.name} is not installed.", hint="Run `pip install 'expertmesh[kubernetes]'`."
        ) from error


def in_pod_client() -> ApiClient:
    """Return a client with the rights of this pod's service account. It reads the token again when that was renewed.

    Raises:
        KubernetesUnavailable: this is no pod, or one without a token, or the `kubernetes` package is missing.
    """
    with kubernetes_extra():
        from kubernetes.client.configuration import Configuration
        from kubernetes.config.config_exception import ConfigException
        from kubernetes.config.incluster_config import load_incluster_config

    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise KubernetesUnavailable(f"The Kubernetes API server cannot be reached ({error}).") from error
    return client_of(configuration)


def client_of(configuration: Configuration) -> ApiClient:
    """Return a client that asks once: its user decides whether to ask again."""
    from kubernetes.client.api_client import ApiClient

    configuration.retries = False
    return ApiClient(configuration)


def pod_namespace(account: Path = ACCOUNT) -> str:
    """Return the namespace of this pod. Raises KubernetesUnavailable where this is no pod, or one without a token."""
    try:
        return (account / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise KubernetesUnavailable(f"The namespace of this pod cannot be read ({error}).") from error
