"""Stand-ins for packages that a bare GPU machine lacks, for measurements alone; filled in before they are imported.

``safetensors`` is read with torch; ``rich``, which would draw a progress bar, does nothing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class MappedFile:
    """As ``safetensors.safe_open``."""

    def __init__(self, path: Path, framework: str) -> None:
        assert framework == "pt"
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        self._start = 8 + int.from_bytes(bytes(self._bytes[:8].tolist()), "little")
        self._header: dict[str, Any] = json.loads(bytes(self._bytes[8 : self._start].tolist()))

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        pass

    def get_tensor(self, name: str) -> torch.Tensor:
        entry = self._header[name]
        first, last = (self._start + at for at in entry["data_offsets"])
        return self._bytes[first:last].clone().view(_DTYPES[entry["dtype"]]).view(entry["shape"])


class Nothing:
    """Takes anything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def fill_in() -> list[str]:
    """Names of the packages that were missing."""
    contents: dict[str, dict[str, Any]] = {
        "safetensors": {"safe_open": MappedFile, "SafetensorError": OSError},
        "rich": {},
        "rich.console": {"Console": Nothing},
        "rich.progress": dict.fromkeys(
            ["BarColumn", "DownloadColumn", "TextColumn", "TimeRemainingColumn", "TransferSpeedColumn", "Progress"],
            Nothing,
        ),
    }
    missing = [name for name in ("safetensors", "rich") if importlib.util.find_spec(name) is None]
    for name, content in contents.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module
    return missing
