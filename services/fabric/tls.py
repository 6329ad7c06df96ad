"""Encrypted connections between attention and expert workers: files in PEM in, contexts out."""

from __future__ import annotations

import ssl
from pathlib import Path

from services.errors import ConfigError


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """An expert worker's; None, for plain connections, where neither file is given.

    Raises:
        ConfigError: one of the two is missing, or they cannot be read or do not belong together.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("A certificate without its key is no use, nor a key without its certificate.", hint=_BOTH)
    context = _tls13(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Cannot use {cert} with {key}: {error}.", hint="Both are PEM files.") from error
    return context


def client_context(ca: Path | None) -> ssl.SSLContext | None:
    """An attention worker's: trusts what ``ca`` signed, for the address in the routing table; None for None.

    Raises:
        ConfigError: the file cannot be read or holds no certificate.
    """
    if ca is None:
        return None
    context = _tls13(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Cannot use --fabric-tls-ca {ca}: {error}.", hint="It is a PEM file.") from error
    return context


_BOTH = "Give both --fabric-tls-cert and --fabric-tls-key."


def _tls13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
