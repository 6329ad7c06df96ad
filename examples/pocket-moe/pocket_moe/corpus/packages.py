"""Names of Debian packages in, unpacked folders out. The only file here that reaches the network."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pocket_moe.errors import PocketError


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An unpacked package."""

    name: str
    version: str
    root: Path


def _run(command: Sequence[str], folder: Path, *, failed: str, hint: str) -> str:
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PocketError(f"{failed}: there is no {command[0]} here.", hint=hint) from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise PocketError(f"{failed}: {reason[0]}", hint=hint) from error
    return done.stdout.strip()


class Packages:
    """``<work>/packages/*.deb`` and ``<work>/unpacked/<package>/``. What is there is not fetched again."""

    def __init__(self, work: Path, *, offline: bool, report: Callable[[str], None]) -> None:
        self._debs, self._unpacked = work / "packages", work / "unpacked"
        self._offline, self._report = offline, report

    def get(self, name: str) -> Package:
        """The package ``name``, downloaded and unpacked where it is not.

        Raises:
            PocketError: it cannot be had; the message names it.
        """
        root = self._unpacked / name
        version = root / "VERSION"
        if not version.is_file():
            self._unpack(name, root)
        return Package(name=name, version=version.read_text(encoding="utf-8").strip(), root=root)

    def _unpack(self, name: str, root: Path) -> None:
        deb = self._deb(name)
        hint = f"Delete {deb} and run data.py again, on Debian or with dpkg installed."
        failed = f"The package {name} cannot be unpacked"
        version = _run(["dpkg-deb", "-f", str(deb), "Version"], deb.parent, failed=failed, hint=hint)
        shutil.rmtree(root, ignore_errors=True)  # of an interrupted run
        root.mkdir(parents=True)
        _run(["dpkg-deb", "-x", str(deb), str(root)], deb.parent, failed=failed, hint=hint)
        (root / "VERSION").write_text(version + "\n", encoding="utf-8")

    def _deb(self, name: str) -> Path:
        self._debs.mkdir(parents=True, exist_ok=True)
        if not (found := sorted(self._debs.glob(f"{name}_*.deb"))):
            self._download(name)
            found = sorted(self._debs.glob(f"{name}_*.deb"))
        if not found:
            raise PocketError(f"The package {name} was not downloaded.", hint=_HINT.format(name=name, debs=self._debs))
        return found[-1]

    def _download(self, name: str) -> None:
        hint = _HINT.format(name=name, debs=self._debs)
        if self._offline:
            raise PocketError(
                f"The package {name} is not in {self._debs}, and --offline forbids to fetch it.", hint=hint
            )
        self._report(f"fetching {name}")
        failed = f"The package {name} cannot be downloaded"
        _run(["apt-get", "download", "-q", name], self._debs, failed=failed, hint=hint)


_HINT = (
    "On Debian 12, run 'apt-get update' and try again; elsewhere put Debian 12's {name}_<version>.deb into {debs}, "
    "or leave the package out with --packages."
)
