"""Stands in for the controller of LeaderWorkerSets: pods in groups, numbered, which know where the first of theirs is.

As the controller does it: groups go from the highest number on, the first pod of one by itself, the others once that is
gone, each in its grace; a pod that is gone comes again under its name. It replaces no pod whose template changed.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.config import new_client_from_config

from testkit.kube.cluster import Cluster

Json = dict[str, Any]
GROUP, VERSION, PLURAL = "leaderworkerset.x-k8s.io", "v1", "leaderworkersets"
LABELS = "leaderworkerset.sigs.k8s.io"
DEFINITION = Path(__file__).parents[2] / "cluster/leaderworkerset-crd.yaml"
EVERY_S = 0.5

log = logging.getLogger(__name__)


@contextmanager
def defined(cluster: Cluster) -> Iterator[bool]:
    """The kind is known meanwhile; whether the cluster has it by itself, with a controller. What a run before left of
    ours does not count."""
    if PLURAL in cluster.kubectl("get", "crd", "-l", "!expertmesh.io/stand-in", "-o", "name"):
        yield True
        return
    cluster.kubectl("apply", "-f", str(DEFINITION))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(DEFINITION), "--timeout=30s")
    try:
        yield False
    finally:
        cluster.kubectl("delete", "-f", str(DEFINITION))


@contextmanager
def controlled(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Give LeaderWorkerSets their pods while the context is open."""
    over = threading.Event()
    controller = _Controller(new_client_from_config(config_file=cluster.environment["KUBECONFIG"]), namespace)

    def run() -> None:
        while not over.wait(EVERY_S):
            try:
                controller.turn()
            except Exception:  # whatever it is, the next turn looks again
                log.exception("no turn")

    thread = threading.Thread(target=run, name="leader-worker-sets", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


class _Controller:
    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._core, self._objects = client.CoreV1Api(api), client.CustomObjectsApi(api)

    def turn(self) -> None:
        where = (GROUP, VERSION, self._namespace, PLURAL)
        for each in self._objects.list_namespaced_custom_object(*where)["items"]:
            name, replicas = each["metadata"]["name"], each["spec"]["replicas"]
            size = each["spec"]["leaderWorkerTemplate"]["size"]
            pods = self._pods(name)
            self._service(each)
            for group in range(replicas):
                for rank in range(size):
                    if _pod_name(name, group, rank) not in pods:
                        self._core.create_namespaced_pod(self._namespace, _pod(each, group, rank))
            self._remove(name, replicas, pods)
            ready = [group for group in range(replicas) if all(_ready(pods, name, group, rank) for rank in range(size))]
            leaders = [pod for pod in pods.values() if pod["metadata"]["labels"][f"{LABELS}/worker-index"] == "0"]
            status = {
                "replicas": len(leaders),
                "readyReplicas": len(ready),
                "hpaPodSelector": f"{LABELS}/name={name},{LABELS}/worker-index=0",
            }
            if each.get("status") != status:
                self._objects.patch_namespaced_custom_object_status(*where, name, {"status": status})

    def _pods(self, name: str) -> dict[str, Json]:
        found = self._core.list_namespaced_pod(self._namespace, label_selector=f"{LABELS}/name={name}")
        plain: list[Json] = self._api.sanitize_for_serialization(found)["items"]
        return {pod["metadata"]["name"]: pod for pod in plain}

    def _remove(self, name: str, replicas: int, pods: dict[str, Json]) -> None:
        """Pods of groups that are not wanted: the first of each, then the others."""
        for pod, found in pods.items():
            labels = found["metadata"]["labels"]
            group, rank = (int(labels[f"{LABELS}/{index}"]) for index in ("group-index", "worker-index"))
            ending = "deletionTimestamp" in found["metadata"]
            if group >= replicas and not ending and (rank == 0 or _pod_name(name, group, 0) not in pods):
                self._core.delete_namespaced_pod(pod, self._namespace)

    def _service(self, each: Json) -> None:
        name = each["metadata"]["name"]
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {f"{LABELS}/name": name}}
        try:
            self._core.create_namespaced_service(self._namespace, {"metadata": {"name": name}, "spec": spec})
        except client.ApiException as error:
            if error.status != 409:  # it is there
                raise


def _pod_name(name: str, group: int, rank: int) -> str:
    return f"{name}-{group}" if rank == 0 else f"{name}-{group}-{rank}"


def _ready(pods: dict[str, Json], name: str, group: int, rank: int) -> bool:
    conditions = pods.get(_pod_name(name, group, rank), {}).get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _pod(each: Json, group: int, rank: int) -> Json:
    name, template = each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]
    pod = copy.deepcopy(template["workerTemplate"])
    own, leader = _pod_name(name, group, rank), _pod_name(name, group, 0)
    owner = {"apiVersion": each["apiVersion"], "kind": each["kind"], "name": name, "uid": each["metadata"]["uid"]}
    labels = {"name": name, "group-index": str(group), "worker-index": str(rank)}
    pod["metadata"] |= {"name": own, "ownerReferences": [owner | {"controller": True}]}
    pod["metadata"]["labels"] |= {f"{LABELS}/{key}": value for key, value in labels.items()}
    pod["spec"] |= {"hostname": own, "subdomain": name}
    given = {
        "LWS_LEADER_ADDRESS": f"{leader}.{name}.{each['metadata']['namespace']}",
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": str(rank),
    }
    for container in pod["spec"]["containers"]:
        container["env"] = [{"name": key, "value": value} for key, value in given.items()] + container["env"]
    return {"apiVersion": "v1", "kind": "Pod"} | pod
