"""`expertmesh fetch`: brings a checkpoint into a folder, checks its files, and marks the folder when it is whole.

It is for volumes that one process fills and others wait for. The mark, written last, names the source: a process that
waits for another source waits on. A record, written first, lists what a fetch puts there, so that the next fetch can
remove it: a folder has one source's files, never a mixture.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from services.cli.sources import Source, canonical, open_source
from services.config import OptionParser
from services.errors import CheckpointError, ConfigError
from services.model.digests import FILE as DIGESTS
from services.model.digests import write_digests
from services.runtime import configure_logging

MARK = ".expertmesh-fetched"
RECORD = ".expertmesh-files"
_POLL_S = 2.0
_NOTE_EVERY = 30

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Fills the folder, or waits until it is whole, and returns 0.

    Raises:
        ConfigError: source or digests are malformed.
        CheckpointError: see :func:`fetch`.
    """
    given = _parser().parse_args(argv)
    configure_logging("fetch")
    source = canonical(given.source)
    if given.wait:
        wait(given.folder, source)
    else:
        fetch(source, given.folder, _digests(given.sha256))
    return 0


def fetch(source: str, folder: Path, digests: Mapping[str, str]) -> None:
    """Fills ``folder`` from ``source``, unless that has been done. ``digests``: file name -> SHA-256, hex.

    Raises:
        CheckpointError: the source is not there, a file does not have its digest, or the folder cannot be written or
            has files that no fetch has put there.
    """
    identity = _identity(source, digests)
    if _mark_of(folder) == identity:
        log.info("%s is already there", source)
        if not (folder / DIGESTS).exists():
            _digest_experts(folder)
        return
    log.info("fetching %s", source)
    try:
        _fill(folder, source, digests)
        _digest_experts(folder)
        _replace(folder / MARK, identity.encode())
    except OSError as error:
        raise CheckpointError(
            f"Cannot fetch {source} into {folder}: {error}.",
            hint="The folder must be writable for this user and have room for the checkpoint.",
        ) from error
    log.info("%s is complete", folder)


def _fill(folder: Path, source: str, digests: Mapping[str, str]) -> None:
    origin = open_source(source, folder)
    _warn_of_change(source, origin)
    folder.mkdir(parents=True, exist_ok=True)
    before, coming = _record_of(folder), origin.files()
    _refuse_unknown_files(folder, {*before.files, *coming}, origin)
    for of_before in (MARK, DIGESTS):
        (folder / of_before).unlink(missing_ok=True)
    for name in before.files if before.revision != origin.revision else set(before.files).difference(coming):
        log.info("removing %s, left over from revision %s", name, before.revision)
        (folder / name).unlink(missing_ok=True)
    _replace(folder / RECORD, msgspec.json.encode(_Record(revision=origin.revision, files=coming)))
    origin.bring(folder)
    check(folder, digests)
    _warn_of_unchecked(coming, digests)


def _digest_experts(folder: Path) -> None:
    """Writes digests for workers that join. The folder is whole without, too: workers then read weights from it."""
    try:
        write_digests(folder)
    except (CheckpointError, OSError) as error:
        log.warning("cannot write the digests of the experts' weights: %s", error)


class _Record(msgspec.Struct, frozen=True):
    """What a fetch put, or began to put, into a folder."""

    revision: str
    files: list[str]


def _refuse_unknown_files(folder: Path, known: Collection[str], origin: Source) -> None:
    """Raises CheckpointError where ``folder`` has files that would be taken for the checkpoint's."""
    visible = (file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if strange := sorted(name for name in visible if name not in known):
        raise CheckpointError(
            f"{folder} has files that are neither part of {origin.revision} nor fetched before: {_listed(strange)}.",
            hint="Remove them, or fetch into another folder.",
        )


def _record_of(folder: Path) -> _Record:
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=_Record)
    except FileNotFoundError:
        return _Record(revision="", files=[])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / RECORD} is damaged: {error}.", hint="Empty the folder.") from error
    inside = folder.resolve()
    if not all((folder / name).resolve().is_relative_to(inside) for name in record.files):
        raise CheckpointError(f"{folder / RECORD} lists files outside of the folder.", hint="Empty the folder.")
    return record


def _replace(file: Path, content: bytes) -> None:
    draft = file.with_name(f"{file.name}.draft")
    draft.write_bytes(content)
    os.replace(draft, file)


def _warn_of_change(source: str, origin: Source) -> None:
    if not origin.fixed:
        log.warning(
            "%s is not pinned to a commit, so its contents may change; it is now at %s", source, origin.revision
        )


def _warn_of_unchecked(names: Sequence[str], digests: Mapping[str, str]) -> None:
    if unchecked := [name for name in names if name not in digests]:
        log.warning("no digest was given for %d of %d files: %s", len(unchecked), len(names), _listed(unchecked))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def wait(folder: Path, source: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns once :func:`fetch` has filled ``folder`` from ``source``, whatever digests it was given."""
    looks = 0
    while _mark_of(folder).partition("\n")[0] != source:
        if looks % _NOTE_EVERY == 0:
            log.info("waiting for %s in %s", source, folder)
        looks += 1
        sleep(_POLL_S)


def check(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises CheckpointError where a file of ``digests`` is missing or has another digest."""
    for name, wanted in digests.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but a digest was given for it.", hint="Check the source.")
        found = _sha256(file)
        if found != wanted:
            raise CheckpointError(
                f"{file} has SHA-256 {found}, not {wanted}.", hint="The source has changed, or the download is damaged."
            )
        log.info("%s matches its digest", name)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        "expertmesh fetch", "Download a checkpoint into a folder and verify it, or wait until another process has."
    )
    parser.add_argument("folder", type=Path, help="folder for the checkpoint")
    parser.add_argument(
        "--source", required=True, help="ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub, or a folder"
    )
    parser.add_argument(
        "--sha256", action="append", default=[], metavar="FILE=HEX", help="digest of a file; may be repeated"
    )
    parser.add_argument("--wait", action="store_true", help="fetch nothing; exit once another process has fetched it")
    return parser


def _digests(words: Sequence[str]) -> dict[str, str]:
    digests = dict(word.rpartition("=")[::2] for word in words)
    for name, digest in digests.items():
        if not name or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ConfigError(f"--sha256 {name}={digest} is no digest.", hint="Write FILE=64 hexadecimal digits.")
    return digests


def _identity(source: str, digests: Mapping[str, str]) -> str:
    return "\n".join([source, *(f"{digest}  {name}" for name, digest in sorted(digests.items()))])


def _mark_of(folder: Path) -> str:
    try:
        return (folder / MARK).read_text(encoding="utf-8")
    except OSError:
        return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
