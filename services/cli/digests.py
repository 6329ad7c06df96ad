"""`expertmesh digests`: writes digests into a checkpoint, by which workers check weights that others send them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from services.config import ExpertFormat, OptionParser
from services.errors import CheckpointError
from services.model.digests import write_digests
from services.model.progress import loading_progress
from services.runtime import configure_logging

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Writes the file and returns 0.

    Raises:
        CheckpointError, ConfigError: see :func:`services.model.digests.write_digests`.
    """
    parser = OptionParser(
        "expertmesh digests", "Write digests by which expert workers verify weights from their peers."
    )
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_argument(
        "--expert-format",
        default="auto",
        choices=get_args(ExpertFormat),
        help="how the workers hold experts, which have an option of this name (default: auto)",
    )
    given = parser.parse_args(argv)
    folder = given.folder
    configure_logging("digests")
    try:
        with loading_progress(log) as progress:
            write_digests(folder, given.expert_format, progress)
    except OSError as error:
        raise CheckpointError(f"Cannot write the digests of {folder}: {error}.", hint="Is it writable?") from error
    return 0
