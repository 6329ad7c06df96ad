"""The application for a Ray cluster: `import_path: expertmesh.ray:app`.

Ray's workers find classes by module and name. An installed package has one name that they can import, this package's,
so the classes that Ray makes on other nodes have their names here; importing them puts the rest on the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expertmesh.__main__ import find_packages

find_packages()

from services.ray import controller, gateway, keeper  # noqa: E402  they are found from here on


class Controller(controller.Controller):
    """See :class:`services.ray.controller.Controller`."""


class Gateway(gateway.Gateway):
    """See :class:`services.ray.gateway.Gateway`."""


class Keeper(keeper.Keeper):
    """See :class:`services.ray.keeper.Keeper`."""


class RedisKeeper(keeper.RedisKeeper):
    """See :class:`services.ray.keeper.RedisKeeper`."""


def app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application that ``args`` describe; see :func:`services.ray.application.app`."""
    from services.ray import application

    return application.app(args)
