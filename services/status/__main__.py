"""``expertmesh status``: what of a deployment is up, what is missing and why. For an operator, and for scripts."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.config import OptionParser, Settings, layer, parse_options
from services.errors import ConfigError, KubernetesUnavailable
from services.queue.connect import connect
from services.runtime.local_servers import (
    FindOnRay,
    LocalServer,
    add_ray,
    add_url,
    none_found,
    with_local_server,
    with_server,
)
from services.status.kube import ClusterReader, connected, has_kubeconfig, in_cluster
from services.status.queue import Queue, QueueReader
from services.status.release import Pod, Release
from services.status.verdict import Status, judge
from services.status.view import as_json, as_text


class Look:
    """Reads Kubernetes and Redis. ``cluster``: makes a reader of the release; None: Kubernetes is not read."""

    def __init__(self, cluster: Callable[[], ClusterReader] | None, queue: QueueReader | None) -> None:
        self._cluster = cluster
        self._queue = queue

    async def status(self) -> Status:
        """Return the verdict. Raises KubernetesUnavailable if only the API server can be read and does not answer."""
        cluster, queue = await asyncio.gather(asyncio.to_thread(self._release), self._depths())
        if isinstance(cluster, KubernetesUnavailable) and queue is None:
            raise cluster
        if isinstance(cluster, KubernetesUnavailable):
            return judge(None, queue, [f"Pods are not shown: {cluster.message}"])
        if cluster is None:
            return judge(None, queue)
        notes = [] if queue else ["Queue and shard groups are not shown: give their Redis with --redis-url."]
        if cluster.hidden:
            kinds = ", ".join(cluster.hidden).capitalize()
            notes.append(f"{kinds} are not shown: {next(iter(cluster.hidden.values()))}")
        return judge(cluster, queue, notes)

    def _release(self) -> Release | KubernetesUnavailable | None:
        if self._cluster is None:
            return None
        try:
            reader = self._cluster()
            release = reader.read()
            return replace(release, pods=tuple(_explained(reader, pod) for pod in release.pods))
        except KubernetesUnavailable as error:
            return error

    async def _depths(self) -> Queue | None:
        return await self._queue.read() if self._queue else None


def _explained(reader: ClusterReader, pod: Pod) -> Pod:
    """Return ``pod`` with what its own page says, where it runs and is not ready."""
    if not pod.why.startswith("runs, but is not ready"):
        return pod
    try:
        page = reader.ready_page(pod)
    except KubernetesUnavailable:
        return pod
    return replace(pod, why=f"{pod.why}: {page}") if page else pod


def main(argv: Sequence[str] | None = None, *, on_ray: FindOnRay | None = None) -> int:
    """Return the exit code: 0 where the model can be served (or sleeps and will be woken), 1 if something is missing.
    ``on_ray`` finds an application on a Ray cluster by its name; None: there is no such option.

    Raises:
        ConfigError: an option is wrong, or nothing says which deployment.
        KubernetesUnavailable: only the API server can be read, and it does not answer.
    """
    parser = _parser()
    if on_ray is not None:
        add_ray(parser)
    given = parse_options(parser, sys.argv[1:] if argv is None else argv, ["redis_url", "redis_url_file", "namespace"])
    found = on_ray(given["ray"]) if on_ray is not None and given["ray"] else None
    about = (with_server(given, found.server), found.server) if found else _deployment(given)
    status = asyncio.run(_look(argparse.Namespace(**given), *about))
    if found:
        status = replace(status, troubles=(*status.troubles, *found.lacks))
    print(as_json(status) if given["json"] else as_text(status))
    return 0 if status.servable else 1


def _deployment(given: Mapping[str, Any]) -> tuple[Settings, LocalServer | None]:
    """Return the settings, and the server on this machine that they are about: none in a pod, or where an option says
    which release is meant. An option that says which server is meant counts in a pod, too."""
    named = any(given[name] is not None for name in ("context", "kube_namespace", "release"))
    if named and given["url"]:
        raise ConfigError("--url means a server on this machine, other options one on Kubernetes.", hint="Give one.")
    released = named or (in_cluster() and not given["url"])
    return (layer(given).settings, None) if released else with_local_server(given)


def _parser() -> OptionParser:
    parser = OptionParser("expertmesh status", "What of a deployment is up, what is missing and why.")
    parser.add_argument(
        "--kubernetes",
        dest="look",
        choices=("auto", "off"),
        default="auto",
        help="auto: ask the API server too, with the pod's account or the kubeconfig (default: auto)",
    )
    parser.add_argument("--context", metavar="NAME", help="kubeconfig context (default: the current one)")
    parser.add_argument("-n", "--kube-namespace", metavar="NAME", help="Kubernetes namespace (default: the context's)")
    parser.add_argument("--release", metavar="NAME", help="name of the Helm release, where there are several")
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


async def _look(given: argparse.Namespace, settings: Settings, server: LocalServer | None) -> Status:
    asks = given.look == "auto" and server is None and (given.context is not None or in_cluster() or has_kubeconfig())
    if not asks and settings.redis_url is None:
        raise ConfigError(
            "Which deployment?",
            hint=f"{none_found()}: give its Redis with --redis-url, or a kubeconfig for one on Kubernetes.",
        )
    if settings.redis_url is None:
        return await Look(_reader_of(given), None).status()
    redis = connect(settings.redis_url)
    try:
        queue = QueueReader(redis, settings.namespace, settings.expert_groups)
        status = await Look(_reader_of(given) if asks else None, queue).status()
        return replace(status, server=f"{server.model_name} at {server.url}") if server else status
    finally:
        await redis.aclose()


def _reader_of(given: argparse.Namespace) -> Callable[[], ClusterReader]:
    def reader() -> ClusterReader:
        client, namespace = connected(given.context)
        pod = socket.gethostname() if in_cluster() else ""
        return ClusterReader(client, given.kube_namespace or namespace, given.release, pod)

    return reader


if __name__ == "__main__":
    sys.exit(main())
