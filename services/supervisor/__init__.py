"""`expertmesh serve`: every role in a process of its own, started, watched, restarted and stopped together."""

from services.supervisor.handover import check_port
from services.supervisor.tree import Supervisor, serve

__all__ = ["Supervisor", "check_port", "serve"]
