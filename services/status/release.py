"""A release by the API's objects: dicts in, workloads and pods with the reasons of what is wrong out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from services.kube import INSTANCE, ROLE, SHARD
from services.status.fetch import Fetch, fetches
from services.status.reasons import Object, newest, short, why_not_ready

SERVING = ("redis", "gateway", "scheduler", "attention", "experts")
"""Roles on a request's path, in the order in which they are shown."""
_NO_CONTROLLER = "does the LeaderWorkerSet controller run (https://lws.sigs.k8s.io)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod. ``why``: what keeps it from being ready; empty where nothing does."""

    name: str
    role: str
    group: int | None
    ready: bool
    why: str = ""
    restarts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Deployment, StatefulSet or LeaderWorkerSet, whose replicas are groups of ``ranks`` pods each.

    ``updated``: replicas of its newest revision. ``why``: what keeps it from making pods.
    """

    name: str
    role: str
    group: int | None
    wanted: int
    ready: int
    updated: int
    why: str = ""
    ranks: int | None = None

    @property
    def title(self) -> str:
        if self.ranks is not None:
            return f"{self.role}, groups of {self.ranks}"
        return self.role if self.group is None else f"{self.role} {self.group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release. ``scaled``: whether KEDA scales some of its replicas, and so wakes them; None: it is not known.
    ``hidden``: kinds of objects that the account may not list, with the API server's reason."""

    name: str
    namespace: str
    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    scaled: bool | None = False
    hidden: Mapping[str, str] = field(default_factory=dict)
    fetches: tuple[Fetch, ...] = ()

    def pods_of(self, workload: Workload) -> list[Pod]:
        return [pod for pod in self.pods if (pod.role, pod.group) == (workload.role, workload.group)]

    @property
    def asleep(self) -> bool:
        """Whether no worker is wanted."""
        workers = [each for each in self.workloads if each.role in ("attention", "experts")]
        return bool(workers) and not any(each.wanted for each in workers)


def release(
    name: str,
    namespace: str,
    *,
    workloads: Iterable[Object],
    pods: Collection[Object],
    jobs: Iterable[Object] = (),
    events: Iterable[Object] = (),
    scaled: bool | None = False,
) -> Release:
    """Return a release by its objects. ``jobs``: those that fetch the model. ``events``: warnings of the namespace, of
    which the newest of each object counts."""
    warnings = newest(events)
    known = [_pod(each, warnings) for each in pods if each["metadata"].get("labels", {}).get(ROLE) in SERVING]
    pods_of = Counter((each.role, each.group) for each in known)
    made = [_workload(each, warnings, pods_of) for each in workloads]
    return Release(
        name=name,
        namespace=namespace,
        workloads=tuple(sorted(made, key=lambda each: (SERVING.index(each.role), each.group or 0))),
        pods=tuple(sorted(known, key=lambda each: (SERVING.index(each.role), each.name))),
        scaled=scaled,
        fetches=fetches(jobs, pods, warnings),
    )


def releases(workloads: Iterable[Object]) -> list[str]:
    """Return the names of the releases that have ``workloads``."""
    return sorted({str(each["metadata"]["labels"][INSTANCE]) for each in workloads})


def _workload(item: Object, warnings: Mapping[str, str], pods_of: Mapping[tuple[str, int | None], int]) -> Workload:
    meta, status = item["metadata"], item.get("status", {})
    wanted, made = int(item["spec"].get("replicas", 1)), int(status.get("replicas", 0))
    role, group, ranks = _role(meta), _group(meta), _ranks(item)
    lacks = made < wanted if ranks is None else pods_of.get((role, group), 0) < wanted * ranks
    why = warnings.get(str(meta["uid"])) or warnings.get(str(meta["name"]), "")
    if not why and ranks is not None and not status:
        why = f"nothing makes its pods: {_NO_CONTROLLER}"
    return Workload(
        name=str(meta["name"]),
        role=role,
        group=group,
        wanted=wanted,
        ready=int(status.get("readyReplicas", 0)),
        updated=int(status.get("updatedReplicas", 0)),
        why=short(why) if lacks else "",
        ranks=ranks,
    )


def _ranks(workload: Object) -> int | None:
    """Return the pods of each group, where ``workload`` is a LeaderWorkerSet."""
    template = workload["spec"].get("leaderWorkerTemplate")
    return None if template is None else int(template.get("size", 1))


def _pod(item: Object, warnings: Mapping[str, str]) -> Pod:
    meta, status = item["metadata"], item.get("status", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    return Pod(
        name=str(meta["name"]),
        role=_role(meta),
        group=_group(meta),
        ready=ready and "deletionTimestamp" not in meta,
        why=why_not_ready(item, ready, warnings.get(str(meta["uid"]), "")),
        restarts=sum(int(each.get("restartCount", 0)) for each in status.get("containerStatuses", ())),
    )


def _role(meta: Object) -> str:
    return str(meta.get("labels", {}).get(ROLE))


def _group(meta: Object) -> int | None:
    group = meta.get("labels", {}).get(SHARD)
    return None if group is None else int(group)
