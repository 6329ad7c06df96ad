"""Pods as they end when their node is gone: their network falls silent, without a FIN or a RST, and their processes are
killed. For a cluster whose node is this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def lose(pods: Sequence[dict[str, Any]]) -> None:
    """Cuts off all of them before the first is killed."""
    processes = {pod["metadata"]["name"]: _processes(pod["metadata"]["uid"]) for pod in pods}
    assert all(processes.values()), processes
    for pids in processes.values():
        subprocess.run(["ip", "link", "set", _host_end(pids[0]), "down"], check=True)
    for pid in (pid for pids in processes.values() for pid in pids):
        os.kill(pid, signal.SIGKILL)


def _processes(uid: str) -> list[int]:
    """Processes in the pod's cgroup."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            groups = (folder / "cgroup").read_text()
        except OSError:
            continue
        if uid in groups or uid.replace("-", "_") in groups:
            found.append(int(folder.name))
    return found


def _host_end(pid: int) -> str:
    """The interface of this machine that leads to the pod of ``pid``."""
    inside = _output("nsenter", "-t", str(pid), "-n", "ip", "-o", "link", "show", "eth0")
    index = re.match(r"\d+: eth0@if(\d+):", inside)
    assert index, inside
    [name] = re.findall(rf"^{index[1]}: ([^@:]+)", _output("ip", "-o", "link"), re.MULTILINE)
    return str(name)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
