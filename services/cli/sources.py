"""Sources of checkpoints: a folder, or the hub. Files whose names begin with a dot do not belong to a checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from services.errors import CheckpointError
from services.model.hub import HubName, hub_errors, hub_name

_HIDDEN = [".*", "*/.*"]
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Source(Protocol):
    @property
    def revision(self) -> str:
        """The commit that the source's name stands for today, or the name itself."""

    @property
    def fixed(self) -> bool:
        """Whether the name always stands for this revision."""

    def files(self) -> list[str]:
        """Returns the names of the checkpoint's files, with slashes between folders."""

    def bring(self, folder: Path) -> None:
        """Puts the checkpoint's files into ``folder``. Raises CheckpointError or OSError where that fails."""


def open_source(source: str, folder: Path) -> Source:
    """Returns the source named ``source``, from which ``folder`` is to be filled.

    Raises:
        CheckpointError: the source is not there, or is inside ``folder``.
    """
    wanted = _on_hub(source)
    return _open_hub(wanted) if wanted else _open_folder(Path(source), folder)


def canonical(source: str) -> str:
    """Returns the one way in which ``source`` is written: hf://ORG/NAME@REVISION, or a folder as it was given. A folder
    that is there is meant before a model on the hub of the same name."""
    wanted = _on_hub(source)
    return f"hf://{wanted}" if wanted else source


def _on_hub(source: str) -> HubName | None:
    return None if Path(source).exists() else hub_name(source)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Folder:
    path: Path
    revision: str
    fixed: bool = True

    def files(self) -> list[str]:
        return _plain(file.name for file in self.path.iterdir() if file.is_file())

    def bring(self, folder: Path) -> None:
        for name in self.files():
            shutil.copyfile(self.path / name, folder / name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hub:
    name: str
    revision: str
    fixed: bool
    names: tuple[str, ...]

    def files(self) -> list[str]:
        return list(self.names)

    def bring(self, folder: Path) -> None:
        from huggingface_hub import snapshot_download

        with hub_errors(HubName(self.name, self.revision)):
            snapshot_download(self.name, revision=self.revision, local_dir=folder, ignore_patterns=_HIDDEN)


def _open_folder(path: Path, folder: Path) -> Source:
    if not path.is_dir():
        raise CheckpointError(f"There is no folder {path}.", hint="Give a folder, or ORG/NAME@REVISION of the hub.")
    if path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path} is inside {folder}, the folder to be filled.", hint="Give another folder.")
    return _Folder(path=path, revision=str(path))


def _open_hub(wanted: HubName) -> Source:
    from huggingface_hub import HfApi

    with hub_errors(wanted):
        found = HfApi().model_info(wanted.name, revision=wanted.revision)
    names = _plain(file.rfilename for file in found.siblings or ())
    revision = wanted.revision or ""
    fixed = _COMMIT.fullmatch(revision) is not None
    return _Hub(name=wanted.name, revision=found.sha or revision, fixed=fixed, names=tuple(names))


def _plain(names: Iterable[str]) -> list[str]:
    """Returns the names, without those of hidden files and those that lead out of the folder."""
    return sorted(name for name in names if not any(part[0] in "./" for part in PurePosixPath(name).parts))
