"""Certificates by an authority of one's own, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


class Authority:
    """``ca.crt`` in ``folder``, and what it signs beside it."""

    def __init__(self, folder: Path, name: str = "an authority") -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self.file = folder, folder / "ca.crt"
        self._make("ca", f"/CN={name}")

    def certificate(self, names: str, file: str = "tls") -> tuple[Path, Path]:
        """For ``names``, as openssl writes them: ``DNS:a,IP:127.0.0.1``. Certificate and key; those of before go."""
        signed = ["-addext", f"subjectAltName={names}", "-CA", "ca.crt", "-CAkey", "ca.key"]
        self._make(file, "/CN=a worker", *signed, "-addext", "basicConstraints=critical,CA:FALSE")
        return self._folder / f"{file}.crt", self._folder / f"{file}.key"

    def _make(self, file: str, subject: str, *words: str) -> None:
        made = ["-keyout", f"{file}.key", "-out", f"{file}.crt", "-subj", subject]
        subprocess.run([*_NEW, *made, *words], cwd=self._folder, check=True, capture_output=True)
