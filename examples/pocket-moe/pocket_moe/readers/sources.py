"""``sources.toml`` in, typed sources out: which package, under which licence, read how."""

from __future__ import annotations

import fnmatch
import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pocket_moe.errors import PocketError

REQUIRED = ("domain", "package", "licence", "notice", "format", "files")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files of one package that go into one domain. ``limit`` is in millions of bytes of text, 0 for all."""

    domain: str
    package: str
    licence: str
    notice: str
    format: str
    files: list[str]
    leave: list[str] = field(default_factory=list)
    main: str = ""
    titles: dict[str, str] = field(default_factory=dict)
    limit: float = 0
    stanza: str = ""
    excerpt: list[str] = field(default_factory=list)


def load_sources(path: Path, only: set[str] | None = None) -> list[Source]:
    """The sources of ``path``, those of the packages ``only`` where it is given.

    Raises:
        PocketError: the file cannot be read, has an unknown or lacks a required field, or lacks a package of ``only``.
    """
    try:
        rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise PocketError(f"{path} cannot be read: {error}", hint="Restore it from git.") from error
    sources = [_source(row, path) for row in rows]
    known = {source.package for source in sources}
    if only and (missing := sorted(only - known)):
        raise PocketError(
            f"{path.name} has no package {', '.join(missing)}.",
            hint=f"--packages names what to keep, such as {','.join(sorted(known)[:3])}; all names are in {path}.",
        )
    return [source for source in sources if not only or source.package in only]


def _source(row: dict[str, Any], path: Path) -> Source:
    wrong = sorted(row.keys() - {item.name for item in fields(Source)}) + [key for key in REQUIRED if key not in row]
    if wrong:
        raise PocketError(
            f"A source in {path} has unknown or missing fields: {', '.join(wrong)}.",
            hint="The comment at the file's head lists the fields.",
        )
    return Source(**row)


def _expand(pattern: str) -> list[str]:
    """``{a,b}`` in a pattern, which pathlib does not know."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if not match:
        return [pattern]
    return [pattern[: match.start()] + name + pattern[match.end() :] for name in match[1].split(",")]


def source_files(source: Source, root: Path) -> Iterator[Path]:
    """The files of ``source`` below its unpacked package ``root``, in a shuffled order that is always the same: what a
    limit leaves of a source is a sample of it.

    Raises:
        PocketError: there are none.
    """
    found = {file for pattern in source.files for glob in _expand(pattern) for file in root.glob(glob)}
    names = {str(file.relative_to(root)): file for file in found if file.is_file() and not file.is_symlink()}
    kept = [name for name in names if not any(fnmatch.fnmatch(f"/{name}", leave) for leave in source.leave)]
    if not kept:
        raise PocketError(
            f"The package {source.package} has none of the files {', '.join(source.files)}.",
            hint="Its version differs from Debian 12's: adapt examples/pocket-moe/sources.toml.",
        )
    yield from (names[name] for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()))
