"""Notes which files a process enters: imported by Python itself at its start, where PYTHONPATH begins with this folder.

SIGUSR1 starts again; SIGUSR2 writes what was entered since to ``TRACED_OUT/<pid>.json``: file or Lua script -> the time
of its first function call, by the monotonic clock.
"""

import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_OUT = os.environ.get("TRACED_OUT", "")
_ROOT = os.environ.get("TRACED_ROOT", "")
_entered: dict[Any, float] = {}


def _note(frame: FrameType, event: str, _argument: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    if code not in _entered:
        _entered[code] = time.monotonic()
    if code.co_name == "run" and code.co_filename.endswith("services/queue/scripts.py"):
        _entered.setdefault(f"services/queue/lua/{frame.f_locals['name']}.lua", time.monotonic())


def _restart(_signal: int, _frame: FrameType | None) -> None:
    _entered.clear()


def _write(_signal: int, _frame: FrameType | None) -> None:
    files: dict[str, float] = {}
    for entered, at in list(_entered.items()):
        file = entered if isinstance(entered, str) else entered.co_filename.removeprefix(_ROOT + "/")
        files[file] = min(at, files.get(file, at))
    path = os.path.join(_OUT, f"{os.getpid()}.json")
    with open(path + ".part", "w", encoding="utf-8") as out:
        json.dump({"argv": sys.argv, "files": files}, out)
    os.replace(path + ".part", path)


if _OUT:
    signal.signal(signal.SIGUSR1, _restart)
    signal.signal(signal.SIGUSR2, _write)
    threading.setprofile(_note)
    sys.setprofile(_note)
