"""A release of the chart: its pods and workloads, by `kubectl` and what that is configured to reach."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.events.host import EventImpossible, run_command
from loadgen.events.plan import Planned
from services.kube import GROUP_OF, INSTANCE, ROLE, SHARD

KINDS = "deployments.apps,statefulsets.apps"
AT_ONCE = ("--grace-period=0", "--force")
Object = dict[str, Any]


class KubeHost:
    """``kubectl``: the words that start it, with the context and the namespace if they are given."""

    def __init__(self, release: str, kubectl: Sequence[str] = ("kubectl",)) -> None:
        self._release = release
        self.kubectl = tuple(kubectl)

    async def find(self, event: Planned) -> str:
        if event.action == "run":
            return event.target
        if event.action == "pause":
            raise EventImpossible("A pod cannot be paused.", hint="Use kill or drain, or AT:run:COMMAND.")
        if event.action == "scale":
            return await self._workload(event.target)
        return f"pod {await self._pod(event.target)}"

    async def act(self, event: Planned) -> str:
        if event.action == "run":
            return await run_command(event.target, shell=True)
        if event.action == "scale":
            workload = await self._workload(event.target)
            await self._run("scale", workload, f"--replicas={event.replicas}")
            return workload
        pod = await self._pod(event.target)
        how = AT_ONCE if event.action == "kill" else ()
        await self._run("delete", "pod", pod, "--wait=false", *how)
        return f"pod {pod}"

    async def _pod(self, target: str) -> str:
        """Returns the first pod, by name, of the role or shard group ``target``, or the one of that name."""
        found = await self._objects("pods")
        mine = [each for each in found if target in _called(each) and "deletionTimestamp" not in each["metadata"]]
        return self._first(mine, found, "pod", target, lambda each: str(each["metadata"]["name"]))

    async def _workload(self, target: str) -> str:
        found = [each for each in await self._objects(KINDS) if GROUP_OF not in each["metadata"]["labels"]]
        mine = [each for each in found if target in _called(each)]
        return self._first(
            mine, found, "workload", target, lambda each: f"{each['kind'].lower()}/{each['metadata']['name']}"
        )

    def _first(
        self,
        mine: list[Object],
        found: list[Object],
        kind: str,
        target: str,
        name: Callable[[Object], str],
    ) -> str:
        if mine:
            return min(map(name, mine))
        known = sorted(set().union(*map(_called, found)))
        raise EventImpossible(
            f"Release {self._release} has no {kind} {target}.",
            hint=f"There are {', '.join(known)}." if known else "Is it in this namespace? Give --kube-namespace.",
        )

    async def _objects(self, kinds: str) -> list[Object]:
        said = await self._run("get", kinds, "-l", f"{INSTANCE}={self._release}", "-o", "json")
        items: list[Object] = json.loads(said)["items"]
        return items

    async def _run(self, *words: str) -> str:
        return await run_command(*self.kubectl, *words)


def _called(each: Object) -> set[str]:
    """Returns the words by which an event may name an object: its name, its role, and its shard group."""
    labels = each["metadata"]["labels"]
    role, group = str(labels.get(ROLE, "")), labels.get(SHARD)
    return {str(each["metadata"]["name"]), role, *([f"{role}-{group}"] if group is not None else [])} - {""}
