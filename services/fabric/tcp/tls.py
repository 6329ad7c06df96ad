"""Encrypted connections between attention and expert workers, by PEM files.

Certificates are renewed while workers run: the next connection reads files again that have changed.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from services.errors import ConfigError

log = logging.getLogger(__name__)


class ServerTls:
    """An expert worker's end.

    Raises:
        ConfigError: the files cannot be read or do not belong together.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._latest = _Latest([cert, key], lambda: _server_context(cert, key))

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Return ``sock`` under TLS before its handshake, which the caller does; the socket can be shut meanwhile."""
        return self._latest.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


class ClientTls:
    """An attention worker's end. It trusts certificates that ``ca`` signed for ``name``, else for the seat's address.

    Raises:
        ConfigError: the file cannot be read or holds no certificate.
    """

    def __init__(self, ca: Path, name: str | None = None) -> None:
        self._latest = _Latest([ca], lambda: _client_context(ca))
        self._name = name

    def wrap(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """Return ``sock`` under TLS after the handshake. Raises OSError, also if the certificate has another name."""
        return self._latest.context().wrap_socket(sock, server_hostname=self._name or host)


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    """Return the TLS of these files, or None, for plain connections, where neither is given.

    Raises:
        ConfigError: one of the two is missing, or :class:`ServerTls` cannot use them.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("A certificate needs its key, and a key its certificate.", hint=_BOTH)
    return ServerTls(cert, key)


_BOTH = "Give both --fabric-tls-cert and --fabric-tls-key."
_Stamp = tuple[int, int, int] | None


class _Latest:
    """Holds the context of ``files`` as they are now, or the last one while they do not fit together. Thread-safe."""

    def __init__(self, files: Sequence[Path], make: Callable[[], ssl.SSLContext]) -> None:
        self._files, self._make = list(files), make
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._context = make()

    def context(self) -> ssl.SSLContext:
        with self._lock:
            if (seen := self._stamps()) != self._seen:
                self._seen = seen
                self._renew()
            return self._context

    def _renew(self) -> None:
        names = " and ".join(map(str, self._files))
        try:
            self._context = self._make()
        except ConfigError as error:
            log.warning("%s changed but cannot be loaded; the previous version stays in use: %s", names, error)
        else:
            log.info("%s changed; loaded the new version", names)

    def _stamps(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _server_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = _tls13(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # without one OpenSSL would ask a terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Cannot use {cert} with {key}: {error}.", hint="Both are PEM files.") from error
    return context


def _client_context(ca: Path) -> ssl.SSLContext:
    context = _tls13(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"Cannot use --fabric-tls-ca {ca}: {error}.", hint="It is a PEM file.") from error
    return context


def _tls13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
