"""A release as Kubernetes sees it: objects of its API in, workloads and pods with the reasons of what is wrong out.

Pure: dicts as the API server sends them, no connection here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.kube import INSTANCE, ROLE, SHARD

Object = Mapping[str, Any]

SERVING = ("redis", "gateway", "scheduler", "attention", "experts")
"""Roles on a request's path, in the order in which they are shown."""
_STILL_STARTING = ("ContainerCreating", "PodInitializing")
_MOST_WORDS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """``why``: what keeps it from being ready; empty where nothing does."""

    name: str
    role: str
    group: int | None
    ready: bool
    why: str = ""
    restarts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A Deployment or StatefulSet. ``updated``: replicas of its newest revision. ``why``: what keeps it from making
    pods."""

    name: str
    role: str
    group: int | None
    wanted: int
    ready: int
    updated: int
    why: str = ""

    @property
    def title(self) -> str:
        return self.role if self.group is None else f"{self.role} {self.group}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """``scaled``: whether KEDA counts some of its replicas, and so wakes them; None: not known.
    ``blind``: why pods are not known."""

    name: str
    namespace: str
    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    scaled: bool | None = False
    blind: str = ""

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
    pods: Iterable[Object],
    events: Iterable[Object] = (),
    scaled: bool | None = False,
) -> Release:
    """``events``: warnings of the namespace; the newest of each object counts."""
    warnings = _newest(events)
    known = [_pod(each, warnings) for each in pods if each["metadata"].get("labels", {}).get(ROLE) in SERVING]
    made = [_workload(each, warnings) for each in workloads]
    return Release(
        name=name,
        namespace=namespace,
        workloads=tuple(sorted(made, key=lambda each: (SERVING.index(each.role), each.group or 0))),
        pods=tuple(sorted(known, key=lambda each: (SERVING.index(each.role), each.name))),
        scaled=scaled,
    )


def releases(workloads: Iterable[Object]) -> list[str]:
    """Names of the releases that ``workloads`` are of."""
    return sorted({str(each["metadata"]["labels"][INSTANCE]) for each in workloads})


def _newest(events: Iterable[Object]) -> dict[str, str]:
    """What the last warning about each object says, by its uid. Failing probes are left out: a pod that is not ready
    says so itself. A Deployment makes its pods through ReplicaSets, named after it and a hash: they count by its name.
    """
    found: dict[str, str] = {}
    for event in sorted(events, key=_moment):
        about, reason = event["involvedObject"], event.get("reason")
        if reason == "Unhealthy":
            continue
        owner = about.get("kind") == "ReplicaSet"
        key = str(about.get("name", "")).rpartition("-")[0] if owner else str(about.get("uid"))
        found[key] = f"{reason}: {event.get('message', '')}"
    return found


def _moment(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _workload(item: Object, warnings: Mapping[str, str]) -> Workload:
    meta, status = item["metadata"], item.get("status", {})
    wanted, made = int(item["spec"].get("replicas", 1)), int(status.get("replicas", 0))
    return Workload(
        name=str(meta["name"]),
        role=_role(meta),
        group=_group(meta),
        wanted=wanted,
        ready=int(status.get("readyReplicas", 0)),
        updated=int(status.get("updatedReplicas", 0)),
        why=_short(warnings.get(str(meta["uid"])) or warnings.get(str(meta["name"]), "")) if made < wanted else "",
    )


def _pod(item: Object, warnings: Mapping[str, str]) -> Pod:
    meta, status = item["metadata"], item.get("status", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    return Pod(
        name=str(meta["name"]),
        role=_role(meta),
        group=_group(meta),
        ready=ready and "deletionTimestamp" not in meta,
        why=_short(_why(item, ready, warnings.get(str(meta["uid"]), ""))),
        restarts=sum(int(each.get("restartCount", 0)) for each in status.get("containerStatuses", ())),
    )


def _why(pod: Object, ready: bool, warning: str) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "leaving"
    if ready:
        return ""
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return f"Pending: {condition.get('message') or condition.get('reason') or 'no node yet'}"
    statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    troubles = [trouble for each in statuses if (trouble := _trouble(each, warning))]
    return troubles[0] if troubles else warning or str(status.get("message") or status.get("phase") or "not ready")


def _trouble(container: Object, warning: str) -> str:
    """What one container lacks; empty where it lacks nothing, or only waits for another."""
    state, words = container.get("state", {}), _last_words(container)
    if waiting := state.get("waiting"):
        reason = str(waiting.get("reason", "waiting"))
        if reason in _STILL_STARTING:
            return f"{reason}: {warning}" if warning else reason if not words else f"ended: {words}"
        return f"{reason}: {words or waiting.get('message') or warning}".removesuffix(": ")
    if ended := state.get("terminated"):
        return "" if ended.get("exitCode") == 0 else f"ended with {ended.get('exitCode')}: {words}"
    if container.get("ready"):
        return ""
    if container.get("started") is False and not words:
        return "is starting"
    again = f", after {container['restartCount']} restarts; it ended with: {words}" if words else ""
    return f"runs, but is not ready{again}"


def _last_words(container: Object) -> str:
    """What the container said as it ended last."""
    for state in (container.get("state", {}), container.get("lastState", {})):
        if ended := state.get("terminated"):
            return str(ended.get("message") or f"{ended.get('reason', 'no word')}, code {ended.get('exitCode')}")
    return ""


def _role(meta: Object) -> str:
    return str(meta.get("labels", {}).get(ROLE))


def _group(meta: Object) -> int | None:
    group = meta.get("labels", {}).get(SHARD)
    return None if group is None else int(group)


def _short(text: str) -> str:
    """One line: the last three of a log, without what the scheduler thought of preemption."""
    lines: Sequence[str] = [line.strip() for line in text.strip().splitlines() if line.strip()]
    words = " ".join(lines[-3:]).partition(" preemption:")[0].strip()
    return words if len(words) <= _MOST_WORDS else words[: _MOST_WORDS - 3] + "..."
