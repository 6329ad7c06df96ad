"""The builder that `serve deploy` and `expertmesh ray up` call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.ray import arguments as given
from services.ray.controller import controller_of
from services.ray.gateway import gateway_of


def app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application: gateways as its way in, and the controller that keeps all other processes.

    Args:
        args: see :class:`services.ray.arguments.Arguments`.

    Raises:
        ConfigError: an argument is unknown, malformed or contradicts another.
    """
    from expertmesh import ray as owned  # it imports the modules of this package

    arguments = given.read(args)
    settings = arguments.checked_settings()
    controller = controller_of(arguments, settings, owned.Controller)
    return gateway_of(arguments, settings, controller, owned.Gateway)
