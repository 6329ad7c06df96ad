"""The name of one life of a process."""

from __future__ import annotations

import os
import socket
import uuid


def incarnation() -> str:
    """A new name: host, process and a draw, so that no process started later has it."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
