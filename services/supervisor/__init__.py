"""Keeps processes running: all of a server (`expertmesh serve`), or one machine's workers (`expertmesh workers`)."""

from services.supervisor.handover import check_port
from services.supervisor.tree import Supervisor, serve
from services.supervisor.workers import Workers, run_workers

__all__ = ["Supervisor", "Workers", "check_port", "run_workers", "serve"]
