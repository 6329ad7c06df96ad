"""The actors of an application, by name: made, found again, asked, stopped. All calls to Ray's core are here.

Actors are detached, so they outlive the controller that made them, which finds them again by their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from services.ray.arguments import Resources
from services.ray.keeper import Report

REDIS = "redis"
"""Name of the private Redis' actor."""
NAMESPACE = "expertmesh"
"""Ray's namespace of all actors here."""
_ANSWER_S = 5.0
_CALLS = 8
"""Calls that an actor answers at once: a stop takes long, and reports go on meanwhile."""

log = logging.getLogger(__name__)


class Gone(Exception):
    """The actor has ended for good, as one whose node cannot make it; the message says why."""


class Unavailable(Exception):
    """The actor does not answer right now: Ray starts it again, or the network failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an actor is to run: on ``node`` if there is room, or on any; or in bundle ``bundle`` of group ``pack``."""

    node: str | None = None
    pack: PlacementGroup | None = None
    bundle: int = 0


class Fleet:
    """Actors of the application ``name``."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}/"

    def names(self) -> list[str]:
        """Return the names of all actors of the application that Ray keeps alive."""
        listed = ray.util.list_named_actors(all_namespaces=True)
        found = [each["name"] for each in listed if each["namespace"] == NAMESPACE]
        return sorted(each.removeprefix(self._prefix) for each in found if each.startswith(self._prefix))

    def find(self, name: str) -> Any:
        """Return the handle of the actor called ``name``. Raises Gone where there is none."""
        try:
            return ray.get_actor(self._prefix + name, namespace=NAMESPACE)
        except ValueError as error:
            raise Gone(name) from error

    def start(
        self,
        name: str,
        arguments: Mapping[str, Any],
        resources: Resources,
        gpus: float,
        place: Place,
        runtime_env: Mapping[str, Any],
    ) -> Any:
        """Have Ray start a :class:`expertmesh.ray.Keeper`, as soon as there is room for it, and return its handle."""
        from expertmesh import ray as owned  # it imports modules of this package

        strategy: Any = "SPREAD"
        if place.pack is not None:
            strategy = PlacementGroupSchedulingStrategy(place.pack, place.bundle)
        elif place.node is not None:
            # Without the last argument it would wait for a node that is full while others have room.
            strategy = NodeAffinitySchedulingStrategy(place.node, soft=True, _spill_on_unavailable=True)
        options = self._options(name) | {
            "num_cpus": resources.cpus,
            "num_gpus": gpus,
            "resources": resources.resources,
            "scheduling_strategy": strategy,
        }
        if resources.labels and place.pack is None:
            options["label_selector"] = resources.labels
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        return ray.remote(owned.Keeper).options(**options).remote(**arguments)

    def start_redis(self, folder: str) -> Any:
        """Have Ray start a :class:`expertmesh.ray.RedisKeeper` on this node, or find the one that runs."""
        from expertmesh import ray as owned

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = self._options(REDIS) | {"num_cpus": 0, "scheduling_strategy": here, "get_if_exists": True}
        return ray.remote(owned.RedisKeeper).options(**options).remote(folder)

    async def report(self, handle: Any) -> Report | None:
        """Return what the actor says; None: it is not there yet, or does not answer. Raises Gone, Unavailable."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                found: Report = await handle.report.remote()
                return found
        except TimeoutError:
            return None
        except ray.exceptions.ActorUnavailableError as error:
            raise Unavailable(str(error)) from error
        except ray.exceptions.ActorDiedError as error:
            raise Gone(_last_line(error)) from error
        except ray.exceptions.RayError as error:
            log.warning("an actor answers with an error: %s", _last_line(error))
            return None

    async def secret(self, handle: Any) -> str | None:
        """Return the fabric's secret, as the actor knows it, empty for none; None where it does not answer."""
        with suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_ANSWER_S):
                found: str = await handle.secret.remote()
                return found
        return None

    async def stop(self, handle: Any, timeout_s: float) -> None:
        """Drain the actor's process, for ``timeout_s`` seconds at most, and end the actor for good."""
        try:
            async with asyncio.timeout(timeout_s):
                await handle.stop.remote()
        except TimeoutError:
            log.warning("an actor did not drain in %.0f s; ending it", timeout_s)
        except ray.exceptions.RayError as error:
            log.info("an actor that was to drain died: %s", _last_line(error))
        self.kill(handle)

    def kill(self, handle: Any) -> None:
        """End the actor and its process at once, for good."""
        ray.kill(handle, no_restart=True)

    def pack(self, name: str, bundle: Mapping[str, float], count: int, labels: Mapping[str, str]) -> PlacementGroup:
        """Return the placement group called ``name``: ``count`` bundles on one node that has ``labels``. It is made if
        there is none."""
        title = self._pack_prefix + name
        try:
            found: PlacementGroup = ray.util.get_placement_group(title)
        except ValueError:
            selector: dict[str, Any] = {"bundle_label_selector": [dict(labels)] * count} if labels else {}
            found = placement_group(
                [dict(bundle)] * count, strategy="STRICT_PACK", name=title, lifetime="detached", **selector
            )
        return found

    def unpack(self, name: str) -> None:
        """Give the placement group called ``name`` back."""
        with suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(self._pack_prefix + name))

    def packs(self) -> dict[str, bool]:
        """Return the names of the application's placement groups, and whether each has its resources."""
        listed = [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        names = {each["name"]: each["state"] == "CREATED" for each in listed}
        return {
            name.removeprefix(self._pack_prefix): there
            for name, there in names.items()
            if name.startswith(self._pack_prefix)
        }

    @property
    def _pack_prefix(self) -> str:
        return f"{NAMESPACE}-{self._prefix}"

    def _options(self, name: str) -> dict[str, Any]:
        return {
            "name": self._prefix + name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": _CALLS,
        }


def _last_line(error: Exception) -> str:
    """Return the last line of an error of Ray's, which has that of the other process with its whole traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)


def nodes() -> list[dict[str, Any]]:
    """Return the nodes that are alive, as Ray lists them."""
    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in listed if node["Alive"]]


def resources(*, free: bool = False) -> Mapping[str, float]:
    """Return the resources of the cluster by name, or those of them that are free."""
    found: Mapping[str, float] = ray.available_resources() if free else ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found
