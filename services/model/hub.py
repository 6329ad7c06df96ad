"""Finds a checkpoint by its id on the Hugging Face Hub, in the hub's cache, and downloads what the cache lacks.

In: ``ORG/NAME`` as --model, and --revision. Out: the folder of the snapshot in the cache, under the model's name.
config.json is checked before any weights are downloaded. Torch-free.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from services.config import Settings
from services.errors import CheckpointError, ConfigError
from services.model.families import spec_from_config
from services.model.load_spec import INDEX

_CONFIGS = ("config.json", "generation_config.json")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
_LEFT_OUT = (".*", "*/*", "consolidated*")
"""Hidden files, folders inside, and Mistral's second copy of the weights."""
_ID = re.compile(r"(?:hf:/{1,2})?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^\s@]+))?")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_NOTE_EVERY_S = 10.0

log = logging.getLogger(__name__)


class HubName(NamedTuple):
    """A model on the hub. ``revision`` is a commit, a branch or a tag; None is the branch that the hub shows."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def hub_name(text: str) -> HubName | None:
    """Return the model that ``text``, ORG/NAME or hf://ORG/NAME, with @REVISION or without, names; else None."""
    found = _ID.fullmatch(text)
    return HubName(found["name"], found["revision"]) if found else None


def with_checkpoint(settings: Settings, *, weights: bool = True) -> Settings:
    """Return ``settings`` with the checkpoint's folder as the model. An id of the hub stays the name in the API.

    Args:
        weights: whether weights are needed, beside the index that names them.

    Raises:
        ConfigError: a revision is given twice, or of a folder.
        CheckpointError: the hub does not give the checkpoint to this user, or cannot be reached.
        UnsupportedModel: its config.json says that it is not one that is supported.
    """
    wanted = _wanted(settings)
    if wanted is None:
        return settings
    folder = snapshot(wanted, weights=weights)
    name = settings.served_model_name or wanted.name
    return settings.model_copy(update={"model": folder, "revision": None, "served_model_name": name})


def config_folder(settings: Settings) -> Path | None:
    """Return a folder with the config.json of the model that ``settings`` name; nothing else is downloaded.

    Raises:
        ConfigError, CheckpointError: see :func:`with_checkpoint`.
    """
    wanted = _wanted(settings)
    return settings.model if wanted is None else _brought(wanted, _CONFIGS[:1])


def _wanted(settings: Settings) -> HubName | None:
    """Return the model on the hub that ``settings`` name; None if it is a folder. See :func:`with_checkpoint`."""
    model, revision = settings.model, settings.revision
    wanted = None if model is None or model.exists() else hub_name(str(model))
    if wanted is None:
        if revision is not None:
            raise ConfigError(
                f"--revision {revision} needs a model of the hub, but --model is {model or 'not given'}.",
                hint="Leave it out, or give --model ORG/NAME.",
            )
        return None
    if revision is not None and wanted.revision is not None:
        raise ConfigError(f"--model {wanted} and --revision {revision} both name a revision.", hint="Leave one out.")
    return wanted._replace(revision=wanted.revision or revision)


def snapshot(wanted: HubName, *, weights: bool = True) -> Path:
    """Return the folder of ``wanted`` in the hub's cache. Its files are downloaded where they are not there; without
    ``weights`` these stay away if there is an index of them, by which members of a deployment know a checkpoint.

    Raises:
        CheckpointError, UnsupportedModel: see :func:`with_checkpoint`.
    """
    log.info("looking for %s on the Hugging Face Hub and in its cache", wanted)
    with _noted(wanted):
        spec_from_config(_brought(wanted, _CONFIGS))
        folder = _brought(wanted, _SMALL)
        if not weights and (folder / INDEX).is_file():
            return folder
        folder = _brought(wanted, (*_SMALL, *_WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{wanted} has no *.safetensors file, or it could not be fetched.",
            hint="Choose a version of the model that has them; HF_HUB_OFFLINE keeps them from being fetched.",
        )
    log.info("using %s from %s", wanted, folder)
    return folder


def _brought(wanted: HubName, patterns: Sequence[str]) -> Path:
    """Return the snapshot's folder with the files of ``patterns``. Without the hub, what is in the cache counts."""
    from huggingface_hub import snapshot_download

    with hub_errors(wanted):
        return Path(
            snapshot_download(
                wanted.name,
                revision=wanted.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_LEFT_OUT),
            )
        )


@contextmanager
def _noted(wanted: HubName) -> Iterator[None]:
    """Show how far the download inside is: the hub's own bars on a terminal, log lines elsewhere."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty():
        yield
        return
    shown, done = not are_progress_bars_disabled(), threading.Event()
    disable_progress_bars()
    notes = threading.Thread(target=_note, args=(wanted, done), daemon=True)
    notes.start()
    try:
        yield
    finally:
        done.set()
        notes.join()
        if shown:
            enable_progress_bars()


def _note(wanted: HubName, done: threading.Event) -> None:
    """Log now and then, until ``done``, how many bytes of ``wanted`` are in the cache."""
    while not done.wait(_NOTE_EVERY_S):
        log.info("downloading %s: %.1f GB so far", wanted, _cached_bytes(wanted) / 1e9)


def _cached_bytes(wanted: HubName) -> int:
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{wanted.name.replace('/', '--')}" / "blobs"
    total = 0
    for file in blobs.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # a part that has just become a whole file, under another name
            continue
    return total


@contextmanager
def hub_errors(wanted: HubName) -> Iterator[None]:
    """Raise what the hub, the way to it, or its cache has against ``wanted`` as a CheckpointError that says what to
    do."""
    try:
        yield
    except Exception as error:
        meant = _meaning(wanted, error)
        if meant is None:
            raise
        raise meant from error


def _meaning(wanted: HubName, error: Exception) -> CheckpointError | None:
    from huggingface_hub import constants, errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    status: int | None = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return CheckpointError(
            f"{wanted} is not complete in the hub's cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set.",
            hint="Unset it, or give the checkpoint's folder.",
        )
    if isinstance(cause, errors.IncompleteSnapshotError):
        return CheckpointError(
            f"{wanted} is incomplete in the hub's cache {constants.HF_HUB_CACHE}, and the rest cannot be fetched.",
            hint="Try again when the hub can be reached.",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return CheckpointError(f"{wanted.name} has no revision {wanted.revision} on the hub.", hint="Check its name.")
    if isinstance(cause, errors.GatedRepoError) or status == 403:
        return CheckpointError(
            f"{wanted.name} is available only to accounts that have accepted its terms.",
            hint=f"Accept them at {constants.ENDPOINT}/{wanted.name} and set HF_TOKEN to a token of that account.",
        )
    if isinstance(cause, errors.RepositoryNotFoundError) or status == 401:
        return CheckpointError(
            f"There is neither a folder {wanted.name} here nor a model of that name on the hub that this user can see.",
            hint="Check the name; if the model is private, set HF_TOKEN to a token of an account that may read it.",
        )
    if isinstance(cause, errors.HFValidationError):
        return CheckpointError(f"{wanted.name} is not a valid name of a model on the hub.", hint="It is ORG/NAME.")
    if status is not None:
        return CheckpointError(
            f"The hub answered the request for {wanted} with status {status}.", hint="Try again later."
        )
    if isinstance(cause, OSError) and cause.errno in _OF_THE_DISK:
        return None if isinstance(cause, ConnectionError) else _unwritable(cause)
    if _of_the_network(cause):
        return CheckpointError(
            f"{wanted} cannot be fetched: {constants.ENDPOINT} cannot be reached ({_first_line(cause)}).",
            hint="Check the network, its DNS and HTTPS_PROXY, or give the folder of a checkpoint on this machine.",
        )
    return None


def _unwritable(error: OSError) -> CheckpointError:
    place = error.filename or "the disk"
    return CheckpointError(
        f"The checkpoint cannot be written to {place}: {error.strerror}.",
        hint="HF_HOME names another folder for the hub's cache.",
    )


def _of_the_network(error: BaseException) -> bool:
    """Return whether ``error`` is of the hub's HTTP client, whichever that is, or of a socket."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    ours = (ConnectionError, TimeoutError, FileNotFoundError)
    return isinstance(error, ours) or bool(kinds & {"httpx", "httpx2", "requests", "huggingface_hub"})


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
