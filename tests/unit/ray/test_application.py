"""What goes to Ray's workers of an application: classes that they can import from an installed package."""

from __future__ import annotations

import pickletools

import pytest

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

from ray import cloudpickle
from ray.serve._private.build_app import build_app

from expertmesh import ray as owned


def _names(pickled: bytes) -> set[str]:
    """Return the first parts of the names in a pickle."""
    return {argument.partition(".")[0] for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}


def test_its_classes_are_found_by_the_one_name_that_a_wheel_has() -> None:
    application = owned.app({"settings": {"model": "some/model", "auth": "off"}})
    deployed = {each.name: each._replica_config for each in build_app(application, name="pocket").deployments}
    assert deployed.keys() == {"Controller", "Gateway"}
    pickled = [
        part for each in deployed.values() for part in (each.serialized_deployment_def, each.serialized_init_args)
    ]
    for part in [*pickled, cloudpickle.dumps(owned.Keeper), cloudpickle.dumps(owned.RedisKeeper)]:
        assert "services" not in _names(part)
    assert all("expertmesh" in _names(each.serialized_deployment_def) for each in deployed.values())
