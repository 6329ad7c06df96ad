"""Shared libraries that tests put under a program, compiled from C where they are needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "native"


class Absent(Exception):
    """Something that tests need is not on this machine; the text says what."""


def compiled(name: str, source: str, versions: str = "") -> Path:
    """The library ``name`` of that C, made once for each text and kept. ``versions``: a version script of the linker.

    Raises:
        Absent: there is no C compiler.
    """
    folder = CACHE / hashlib.sha256(f"{source}\n{versions}".encode()).hexdigest()[:16]
    library = folder / name
    if library.exists():
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        raise Absent("there is no C compiler (cc)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        words = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", f"{made}/{name}"]
        if versions:
            Path(made, "versions").write_text(versions)
            words.append(f"-Wl,--version-script,{made}/versions")
        subprocess.run(words, input=source, text=True, check=True)
        os.replace(f"{made}/{name}", library)  # other processes of the tests may make it, too
    return library
