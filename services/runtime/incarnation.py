"""A name for a process that no other process has, not even the one that replaces it."""

from __future__ import annotations

import os
import socket
import uuid


def incarnation() -> str:
    """Draw a new name: host, process number and random digits."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
