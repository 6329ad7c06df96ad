"""Sources of checkpoints: a folder, or the hub. Files whose names begin with a dot do not belong to a checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from services.errors import CheckpointError

_HUB = "hf://"
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
    return _open_hub(source) if source.startswith(_HUB) else _open_folder(Path(source), folder)


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
        from huggingface_hub.errors import HfHubHTTPError

        try:
            snapshot_download(self.name, revision=self.revision, local_dir=folder, ignore_patterns=_HIDDEN)
        except (HfHubHTTPError, ValueError) as error:
            raise _cannot_fetch(f"{_HUB}{self.name}@{self.revision}", error) from error


def _open_folder(path: Path, folder: Path) -> Source:
    if not path.is_dir():
        raise CheckpointError(f"There is no folder {path}.", hint="Give a folder, or hf://ORG/NAME@REVISION.")
    if path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path} is inside {folder}, which is to be filled from it.", hint="Give another folder.")
    return _Folder(path=path, revision=str(path))


def _open_hub(source: str) -> Source:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = source.removeprefix(_HUB).partition("@")
    try:
        found = HfApi().model_info(name, revision=revision or None)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _cannot_fetch(source, error) from error
    names = _plain(file.rfilename for file in found.siblings or ())
    fixed = _COMMIT.fullmatch(revision) is not None
    return _Hub(name=name, revision=found.sha or revision, fixed=fixed, names=tuple(names))


def _plain(names: Iterable[str]) -> list[str]:
    """Returns the names, without those of hidden files and those that lead out of the folder."""
    return sorted(name for name in names if not any(part[0] in "./" for part in PurePosixPath(name).parts))


def _cannot_fetch(source: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"Cannot fetch {source}: {error}.", hint="Check its name and HF_TOKEN.")
