"""Jobs that bring the model into its volume, for which all pods wait: their state, and why they fail. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.status.reasons import Object, short, why_not_ready

FETCH = "fetch"
"""Role of these Jobs and their pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """A Job. ``over``: it makes no more pods. ``failed``: pods that did not bring the model. ``why``: what the newest
    pod lacked, or what keeps a pod from being made; empty where nothing did."""

    name: str
    done: bool
    over: bool
    failed: int
    why: str = ""


def fetches(jobs: Iterable[Object], pods: Collection[Object], warnings: Mapping[str, str]) -> tuple[Fetch, ...]:
    """Return the state of ``jobs``, whose pods are among ``pods``. ``warnings``: each object's newest event, by uid."""
    return tuple(_fetch(job, _newest_first(job, pods), warnings) for job in jobs)


def _fetch(job: Object, pods: Iterable[Object], warnings: Mapping[str, str]) -> Fetch:
    meta, status = job["metadata"], job.get("status", {})
    met = {each["type"]: each for each in status.get("conditions", ()) if each["status"] == "True"}
    words = [*_words(pods, warnings), warnings.get(str(meta["uid"]), ""), str(met.get("Failed", {}).get("message", ""))]
    done = "Complete" in met
    return Fetch(
        name=str(meta["name"]),
        done=done,
        over=done or "Failed" in met,
        failed=int(status.get("failed", 0)),
        why="" if done else short(next(filter(None, words), "")),
    )


def _newest_first(job: Object, pods: Iterable[Object]) -> list[Object]:
    uid = job["metadata"]["uid"]
    its = [pod for pod in pods if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))]
    return sorted(its, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True)


def _words(pods: Iterable[Object], warnings: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons of the pods that lack something. A pod that runs is ready, for it has no probe."""
    for pod in pods:
        meta, conditions = pod["metadata"], pod.get("status", {}).get("conditions", ())
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        if why := why_not_ready(pod, ready, warnings.get(str(meta["uid"]), "")):
            yield f"{meta['name']}: {why}"
