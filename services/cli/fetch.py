"""`expertmesh fetch`: brings a checkpoint into a folder, checks its files, and says when it is whole.

For volumes that one process fills and others wait for. What makes the folder whole is a mark, written last, that names
the source: whoever waits for another source waits on.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.config import OptionParser
from services.errors import CheckpointError, ConfigError
from services.runtime import configure_logging

MARK = ".expertmesh-fetched"
_HUB = "hf://"
_POLL_S = 2.0
_NOTE_EVERY = 30

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Returns 0 once the folder is whole.

    Raises:
        ConfigError: source or digests are malformed.
        CheckpointError: see :func:`fetch`.
    """
    given = _parser().parse_args(argv)
    configure_logging("fetch")
    if given.wait:
        wait(given.folder, given.source)
    else:
        fetch(given.source, given.folder, _digests(given.sha256))
    return 0


def fetch(source: str, folder: Path, digests: Mapping[str, str]) -> None:
    """Fills ``folder`` from ``source``; at once where that has been done. ``digests``: file name -> SHA-256, hex.

    Raises:
        CheckpointError: the source is not there, a file is not what its digest says, or the folder cannot be written.
    """
    identity = _identity(source, digests)
    if _mark_of(folder) == identity:
        log.info("%s is there already", source)
        return
    log.info("fetching %s", source)
    try:
        _fill(folder, source, digests)
        _write_mark(folder, identity)
    except OSError as error:
        raise CheckpointError(
            f"Cannot fetch {source} into {folder}: {error}.",
            hint="The folder has to be writable for this user and large enough for the checkpoint.",
        ) from error
    log.info("%s is whole", folder)


def _fill(folder: Path, source: str, digests: Mapping[str, str]) -> None:
    (folder / MARK).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if source.startswith(_HUB):
        _from_hub(source, folder)
    else:
        _from_folder(Path(source), folder)
    check(folder, digests)


def _write_mark(folder: Path, identity: str) -> None:
    draft = folder / f"{MARK}.draft"
    draft.write_text(identity, encoding="utf-8")
    os.replace(draft, folder / MARK)


def wait(folder: Path, source: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns once :func:`fetch` has filled ``folder`` from ``source``, whatever digests it was given."""
    looks = 0
    while _mark_of(folder).partition("\n")[0] != source:
        if looks % _NOTE_EVERY == 0:
            log.info("waiting for %s in %s", source, folder)
        looks += 1
        sleep(_POLL_S)


def check(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises CheckpointError where a file of ``digests`` is missing or another."""
    for name, wanted in digests.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is not there, but a digest is given for it.", hint="Check the source.")
        found = _sha256(file)
        if found != wanted:
            raise CheckpointError(
                f"{file} has SHA-256 {found}, not {wanted}.", hint="The source has changed, or was damaged on the way."
            )
        log.info("%s is as its digest says", name)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        "expertmesh fetch", "Bring a checkpoint into a folder and check it, or wait until it is there."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", required=True, help="hf://ORG/NAME@REVISION, or a folder")
    parser.add_argument(
        "--sha256", action="append", default=[], metavar="FILE=HEX", help="digest of a file; may be repeated"
    )
    parser.add_argument("--wait", action="store_true", help="fetch nothing; end when another process has")
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


def _from_hub(source: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = source.removeprefix(_HUB).partition("@")
    try:
        snapshot_download(name, revision=revision or None, local_dir=folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"Cannot fetch {source}: {error}.", hint="Check its name and HF_TOKEN.") from error


def _from_folder(source: Path, folder: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"There is no folder {source}.", hint="Give a folder, or hf://ORG/NAME@REVISION.")
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
