"""Reasons why a pod is not ready, or is not made, by its containers and by events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

_STILL_STARTING = ("ContainerCreating", "PodInitializing")
_MAX_WORDS = 400
_NOTE = '"level": "info"'
"""Part of a JSON line of a role's log that is only informative."""


def newest(events: Iterable[Object]) -> dict[str, str]:
    """Return each object's last warning, by its uid. Failing probes are left out: a pod that is not ready says so."""
    found: dict[str, str] = {}
    for event in sorted(events, key=_moment):
        if (reason := event.get("reason")) != "Unhealthy":
            said = f"{reason}: {event.get('message', '')}"
            found |= dict.fromkeys(_about(event["involvedObject"]), said)
    return found


def _about(involved: Object) -> Iterator[str]:
    """Yield the uid, and the name of the workload for which a controller made the object. A Deployment's ReplicaSets
    have its name and a hash; a LeaderWorkerSet's StatefulSets have its name, those of the groups with a number."""
    name = str(involved.get("name", ""))
    yield str(involved.get("uid"))
    if involved.get("kind") in ("ReplicaSet", "StatefulSet"):
        yield name.rpartition("-")[0]
    if involved.get("kind") == "StatefulSet":
        yield name


def _moment(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def why_not_ready(pod: Object, ready: bool, warning: str) -> str:
    """Return the reason, or empty where ``pod`` is ready. ``warning``: the newest event about the pod."""
    return short(_why(pod, ready, warning))


def short(text: str) -> str:
    """Return ``text`` as one line: the last three lines of a log that are not informative, or a message of the
    Kubernetes scheduler without its part on preemption."""
    lines: Sequence[str] = [line.strip() for line in text.strip().splitlines() if line.strip()]
    warnings = [line for line in lines if _NOTE not in line] or lines
    words = " ".join(warnings[-3:]).partition(" preemption:")[0].strip()
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 3] + "..."


def _why(pod: Object, ready: bool, warning: str) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "leaving"
    if ready:
        return ""
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return f"Pending: {condition.get('message') or condition.get('reason') or 'no node yet'}"
    before = (_before(each, warning) for each in status.get("initContainerStatuses", ()))
    troubles = (_trouble(each, warning) for each in status.get("containerStatuses", ()))
    last = warning or str(status.get("message") or status.get("phase") or "not ready")
    return next(filter(None, [*before, *troubles]), last)


def _before(container: Object, warning: str) -> str:
    """Return what keeps an init container from ending well; empty where it has ended well, or is a ready sidecar."""
    if "running" in container.get("state", {}) and not container.get("ready"):
        return f"{container['name']} has not ended yet{_ended_before(container)}"
    trouble = _trouble(container, warning)
    return f"{container['name']}: {trouble}" if trouble else ""


def _trouble(container: Object, warning: str) -> str:
    """Return what one container lacks; empty where it lacks nothing, or waits for another container."""
    state, words = container.get("state", {}), _last_words(container)
    if waiting := state.get("waiting"):
        reason = str(waiting.get("reason", "waiting"))
        if reason in _STILL_STARTING:
            return f"{reason}: {warning}" if warning else reason if not words else f"ended: {words}"
        return f"{reason}: {words or waiting.get('message') or warning}".removesuffix(": ")
    if ended := state.get("terminated"):
        return "" if ended.get("exitCode") == 0 else f"ended: {words}"
    if container.get("ready"):
        return ""
    if container.get("started") is False and not words:
        return "is starting"
    return f"runs, but is not ready{_ended_before(container)}"


def _ended_before(container: Object) -> str:
    words = _last_words(container)
    return f", after {container['restartCount']} restarts; it ended with: {words}" if words else ""


def _last_words(container: Object) -> str:
    """Return how the container ended last, and its message."""
    for state in (container.get("state", {}), container.get("lastState", {})):
        if ended := state.get("terminated"):
            how = f"{ended.get('reason', 'no word')}, code {ended.get('exitCode')}"
            return f"{how}: {short(ended['message'])}" if ended.get("message") else how
    return ""
