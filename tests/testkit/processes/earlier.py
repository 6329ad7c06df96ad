"""The source of an earlier release, out of this repository's history."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
LAST_RELEASE = "2d85cd81102b37be1619b6c794bd00a5e296eed4"
"""The commit whose processes serve together with those of this one."""

_NAMES = {"experts_timeout": "experts_patience", "joint_steps": "fabric_teams"}
_EXPERTS = {"local": "local", "disaggregated": "tcp", "lockstep": "mesh"}


def has_history(commit: str = LAST_RELEASE) -> bool:
    """Whether this clone knows the commit; shallow ones do not."""
    words = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def unpack(folder: Path, commit: str = LAST_RELEASE) -> Path:
    """The files of ``commit``, in ``folder``, which is returned."""
    packed = subprocess.Popen(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], stdin=packed.stdout, check=True)
    assert packed.wait() == 0, f"{commit} is no commit of this repository"
    return folder


def options_of_earlier(options: Mapping[str, object]) -> dict[str, object]:
    """Those of one process, as that release calls them."""
    said = {_NAMES.get(name, name): value for name, value in options.items() if name != "layout"}
    return said | ({"experts": _EXPERTS[str(options["layout"])]} if "layout" in options else {})
