"""Judges by Kubernetes and Redis whether the model can be served, and what is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.status.fetch import Fetch
from services.status.queue import Queue
from services.status.release import Release, Workload

_MAX_PODS = 3
_NEEDED = {
    "gateway": ("Deployment",),
    "scheduler": ("Deployment",),
    "attention": ("Deployment", "LeaderWorkerSet"),
}
"""Roles that every release has, with their kinds of workload. Redis may be elsewhere, experts in attention workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The verdict. ``missing``: what a request would wait for, with reasons. ``troubles``: what is wrong while requests
    are served. ``notes``: what was not read, and why. Kubernetes or Redis is None where it was not read. ``server``:
    model and URL of a server on this machine, if it is about one."""

    release: Release | None
    queue: Queue | None
    missing: tuple[str, ...]
    troubles: tuple[str, ...]
    notes: tuple[str, ...] = ()
    server: str = ""

    @property
    def asleep(self) -> bool:
        return self.release is not None and self.release.asleep

    @property
    def sleeps(self) -> int:
        """The level at which the model sleeps until somebody wakes it; 0: it does not."""
        return 0 if self.queue is None else self.queue.sleep

    @property
    def servable(self) -> bool:
        return not self.missing


def judge(release: Release | None, queue: Queue | None, notes: Iterable[str] = ()) -> Status:
    """Return the verdict on what was read; ``release`` or ``queue`` may be None, not both."""
    missing, troubles = _of_release(release, alone=queue is None) if release else ([], [])
    if queue is not None:
        missing += _of_queue(queue, asleep=release is not None and release.asleep)
        troubles += [
            f"Shard group {number} is none of the {len(queue.groups)} in use: its workers get nothing."
            for number in queue.surplus
        ]
        troubles += [queue.faults] if queue.faults else []
    return Status(release=release, queue=queue, missing=tuple(missing), troubles=tuple(troubles), notes=tuple(notes))


def _of_release(release: Release, *, alone: bool) -> tuple[list[str], list[str]]:
    missing, troubles = _absent(release, alone=alone), []
    for workload in release.workloads:
        asleep = release.asleep and workload.role in ("attention", "experts")
        line = f"{workload.title}: {workload.ready} of {workload.wanted} ready{_reasons(release, workload)}"
        if not workload.ready and not asleep:
            missing.append(line)
        elif workload.ready < workload.wanted:
            troubles.append(line)
        elif _stuck(release, workload):
            troubles.append(f"{workload.title}: its rollout waits{_reasons(release, workload)}")
    waited_for = [fetch for fetch in release.fetches if not fetch.done]
    if missing:
        missing[:0] = map(_fetch, waited_for)
    else:
        troubles += [_fetch(fetch) for fetch in waited_for if fetch.why]
    if release.asleep and release.scaled is False:
        missing.append("The model is scaled to zero, and nothing wakes it: no ScaledObject counts its replicas.")
    return missing, troubles


def _absent(release: Release, *, alone: bool) -> list[str]:
    """Return the roles that have no workload. ``alone``: Redis, which knows what is registered, was not read."""
    absent = []
    for role, kinds in _NEEDED.items():
        seen = [kind for kind in kinds if f"{kind.lower()}s" not in release.hidden]
        line = f"{role}: the release has no {' or '.join(seen)} of it"
        if any(workload.role == role for workload in release.workloads):
            continue
        if len(seen) == len(kinds):
            absent.append(f"{line}.")
        elif alone:
            absent.append(f"{line}, and others may not be listed here.")
    return absent


def _fetch(fetch: Fetch) -> str:
    state = "gave up" if fetch.over else "tries again" if fetch.failed else "has not ended"
    attempts = f" (failed attempts: {fetch.failed})" if fetch.failed else ""
    return f"model fetch: the Job {fetch.name} {state}{attempts}" + (f"\n{fetch.why}" if fetch.why else "")


def _stuck(release: Release, workload: Workload) -> bool:
    """Return whether pods of a new revision are not ready, though enough old ones are."""
    return any(not pod.ready and pod.why != "leaving" for pod in release.pods_of(workload))


def _reasons(release: Release, workload: Workload) -> str:
    reasons = [workload.why] if workload.why else []
    pods = [pod for pod in release.pods_of(workload) if not pod.ready]
    reasons += [f"{pod.name}: {pod.why}" for pod in pods[:_MAX_PODS]]
    reasons += [f"and {len(pods) - _MAX_PODS} more"] if len(pods) > _MAX_PODS else []
    return "".join(f"\n{reason}" for reason in reasons) or ("" if workload.wanted else " (scaled to zero)")


def _of_queue(queue: Queue, *, asleep: bool) -> list[str]:
    if queue.problem:
        return [queue.problem]
    missing = [] if queue.leader else ["No scheduler leads: requests wait in the queue."]
    if not queue.gateways:
        missing.append("No gateway is registered in Redis.")
    if asleep or queue.sleep:
        return missing
    for number, group in queue.groups.items():
        if not group.seats:
            coming = ", ".join(f"{count} {word}" for word, count in group.coming.items()) or "none is coming"
            missing.append(f"Shard group {number} has no expert worker in the routing table: {coming}.")
    if not queue.workers:
        missing.append("No attention worker is registered in Redis.")
    elif len(queue.blocked) == len(queue.workers):
        missing.append("No attention worker takes requests: all of them miss experts.")
    return missing
