"""Prometheus for this machine: its configuration and its command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from services.errors import ConfigError, ProgramMissing
from services.observe.program import Program

SCRAPE = "2s"
RULES = Path(__file__).parents[2] / "helm/expertmesh/rules/expertmesh.rules.yaml"
JOB = "expertmesh"
MAX_DATA = "2GB"
_SIZE = re.compile(r"[1-9]\d*(MB|GB|TB)")


def find() -> str:
    """Return the program.

    Raises:
        ProgramMissing: there is none on PATH.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise ProgramMissing(
            "There is no `prometheus` on PATH.",
            hint="Install it (Debian and Ubuntu: `apt install prometheus`), or draw the dashboards of one that runs "
            "elsewhere: `expertmesh dashboards --prometheus URL`.",
        )
    return found


def size(text: str) -> str:
    """Return ``text`` where Prometheus reads it as a size of at least a megabyte.

    Raises:
        ConfigError: it does not.
    """
    if _SIZE.fullmatch(text) is None:
        raise ConfigError(f"{text!r} is no size.", hint=f"Write it as in --max-data {MAX_DATA}, in MB, GB or TB.")
    return text


def config(targets: Path, rules: Sequence[Path]) -> str:
    """Return the configuration's text. ``targets``: a file of file_sd, read again when it changes."""
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": [str(file) for file in rules],
            "scrape_configs": [
                {
                    "job_name": JOB,
                    "file_sd_configs": [{"files": [str(targets)], "refresh_interval": SCRAPE}],
                }
            ],
        },
        sort_keys=False,
    )


def program(binary: str, file: Path, data: Path, log: Path, port: int, *, most: str) -> Program:
    """Return Prometheus as it runs with the configuration in ``file``, listening on loopback alone. ``most`` is what
    ``data`` may take of the disk: beyond it the oldest is deleted."""
    command = [
        binary,
        f"--config.file={file}",
        f"--storage.tsdb.path={data}",
        f"--storage.tsdb.retention.size={most}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    return Program("Prometheus", command, log, f"http://127.0.0.1:{port}/-/ready")
