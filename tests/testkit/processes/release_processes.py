"""Processes that run the last release's own code on its fabric."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("release_peer.py")
_TIMEOUT_S = 120.0


class Peer:
    """``testkit/processes/release_peer.py`` in the role ``todo``, by the code in ``folder``."""

    def __init__(self, folder: Path, **todo: Any) -> None:
        paths = os.pathsep.join(str(folder / part) for part in (".", "kernels", "tests"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT.read_text(), json.dumps(todo)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._overdue = threading.Timer(_TIMEOUT_S, self._process.kill)
        self._overdue.start()
        code = self.hear().get("code", "")
        assert Path(code).is_relative_to(folder), f"it runs the code in {code}"

    def hear(self) -> dict[str, Any]:
        """What it says next; {} once it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()

    def code(self) -> int:
        """How it ends, once its input is closed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def end(self) -> None:
        self._overdue.cancel()
        self._process.kill()
        self._process.wait()


@contextmanager
def peer(folder: Path, **todo: Any) -> Iterator[Peer]:
    running = Peer(folder, **todo)
    try:
        yield running
    finally:
        running.end()
