"""The same services on a Ray cluster: `import_path: expertmesh.ray:app`, or `expertmesh ray up`. Needs the extra `ray`.

Ray places and restarts the processes, and Ray Serve is the way in. Queue, scheduler, workers and the links between them
are those that run everywhere else: rows never pass Ray's object store or its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application that ``args`` describe; see :func:`services.ray.application.app`. In a clone it has
    this name, too."""
    from services.ray import application  # `expertmesh ray --help` needs no Ray

    return application.app(args)
