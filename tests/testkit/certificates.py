"""Certificates of an authority of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_authority(folder: Path, name: str = "ca") -> None:
    """``NAME.crt`` and ``NAME.key``."""
    _openssl(folder, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")


def issue(folder: Path, *names: str, authority: str = "ca") -> None:
    """``tls.crt`` and ``tls.key`` for ``names``, in place of those that are there."""
    alternatives = ",".join(f"DNS:{name}" for name in names)
    files = ("-keyout", "tls.key", "-out", "tls.crt", "-subj", f"/CN={names[0]}")
    signed = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key")
    _openssl(folder, *files, "-addext", f"subjectAltName={alternatives}", *signed)


def _openssl(folder: Path, *words: str) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*new, *words], cwd=folder, check=True, capture_output=True)
