"""The controller beside other applications of a cluster, and where there is no Redis for all machines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

from services.errors import ConfigError
from services.ray import controller as module
from services.ray.controller import Controller

URL = "redis://10.0.0.9:6379/0"
Identity = tuple[str, str, bool]


class NoActors:
    """Stands in for :class:`services.ray.fleet.Fleet`: nothing runs."""

    def __init__(self, _app: str) -> None:
        pass

    def names(self) -> list[str]:
        return []


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, Identity]:
    """What other applications of the cluster say who they are, by name."""
    known: dict[str, Identity] = {}

    def handle(_deployment: str, name: str) -> Any:
        async def identity() -> Identity:
            return known[name]

        return SimpleNamespace(identity=SimpleNamespace(remote=identity))

    def status() -> Any:
        return SimpleNamespace(applications={name: SimpleNamespace(deployments={"Controller": 1}) for name in known})

    context = SimpleNamespace(app_name="mine")
    serve = SimpleNamespace(get_replica_context=lambda: context, get_deployment_handle=handle, status=status)
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(module, "Fleet", NoActors)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    return known


async def begin(**settings: Any) -> str:
    """Return the URL of Redis as gateways hear it."""
    given = {"model": "some/model", "auth": "off"} | settings
    controller = Controller({"settings": given})
    try:
        return await controller.redis_url()
    finally:
        controller._loop_task.cancel()
        await asyncio.wait([controller._loop_task])


@pytest.mark.parametrize("theirs", [("zoo", True), ("app", False)], ids=["it has processes", "both begin"])
async def test_a_second_application_in_a_namespace_is_refused_by_name(
    others: dict[str, Identity], theirs: tuple[str, bool]
) -> None:
    name, has_processes = theirs
    others[name] = (URL, "expertmesh", has_processes)
    with pytest.raises(
        ConfigError, match=f"The application {name} of this cluster serves in namespace expertmesh"
    ) as no:
        await begin(redis_url=URL)
    assert "settings.namespace" in str(no.value)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("zoo", (URL, "other", True)),
        ("zoo", ("redis://10.0.0.8:6379/0", "expertmesh", True)),
        ("zoo", (URL, "expertmesh", False)),
        ("app", ("", "expertmesh", True)),
    ],
    ids=["another namespace", "another Redis", "the other one gives way", "a Redis of its own"],
)
async def test_applications_apart_begin_beside_each_other(
    others: dict[str, Identity], name: str, identity: Identity
) -> None:
    others[name] = identity
    assert await begin(redis_url=URL) == URL


@pytest.mark.usefixtures("others")
async def test_several_machines_need_a_redis_that_all_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nodes", lambda: [{"NodeManagerHostname": name} for name in ("a", "b")])
    with pytest.raises(ConfigError, match="has 2 machines, and settings"):
        await begin()
