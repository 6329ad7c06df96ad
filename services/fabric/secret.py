"""The secret that attention and expert workers of a cluster share."""

from __future__ import annotations

from pathlib import Path

from services.errors import ConfigError

MIN_BYTES = 16


def read_secret(file: Path) -> bytes:
    """Return the secret that all workers of a cluster share, without white space around it.

    Raises:
        ConfigError: the file cannot be read, or holds too little.
    """
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"Cannot read --fabric-secret-file: {error}.", hint="Check path and permissions.") from error
    if len(secret) < MIN_BYTES:
        raise ConfigError(
            f"The secret in {file} has {len(secret)} bytes, fewer than {MIN_BYTES}.",
            hint="Make one: head -c 32 /dev/urandom | base64 > FILE",
        )
    return secret
