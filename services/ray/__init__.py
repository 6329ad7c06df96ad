"""The same services on a Ray cluster: `import_path: services.ray:app`, or `expertmesh ray up`. Needs the extra `ray`.

Ray places and restarts the processes, and Ray Serve is the way in. Queue, scheduler, workers and the links between them
are those that run everywhere else: rows never pass Ray's object store or its tasks.
"""

from services.ray.application import app

__all__ = ["app"]
