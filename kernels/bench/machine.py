"""Which machine and which versions a measurement came from."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """``commit`` ends in "+" if tracked files differ from it; "" where there is no repository."""

    gpu: str
    torch: str
    triton: str
    vllm: str
    date: str
    commit: str


def this_machine() -> Machine:
    return Machine(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        torch=torch.__version__,
        triton=version("triton"),
        vllm=version("vllm"),
        date=datetime.date.today().isoformat(),
        commit=_commit(),
    )


def version(package: str) -> str:
    """ "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
