"""Source files of Go in, their documentation comments out: what its tools print as a package's documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pocket_moe.readers.text import Block, sections

_DECLARED = re.compile(r"^(package|func|type|var|const)\b\s*(?:\([^)]*\)\s*)?(\w*)")
_DIRECTIVE = re.compile(r"^//(?:go:|\+build|line |export )")
SHORTEST = 60  # 'Close closes the file.' teaches nothing


def _comments(source: str) -> Iterator[tuple[str, list[str]]]:
    """(declaration, lines) of each block of ``//`` lines that a declaration follows at once."""
    lines: list[str] = []
    in_block = False
    for line in source.splitlines():
        if in_block or line.startswith("/*"):
            lines = [] if not in_block else lines
            in_block = "*/" not in line
            lines.append(line.replace("/*", "").replace("*/", ""))
        elif line.startswith("//"):
            if not _DIRECTIVE.match(line):
                lines.append(line[2:].removeprefix(" "))
        else:
            if lines and _DECLARED.match(line):
                yield line, lines
            lines = []


def _blocks(lines: list[str]) -> Iterator[Block]:
    for part in re.split(r"\n\s*\n", "\n".join(lines)):
        text = part.strip("\n")
        if text.startswith("# "):
            yield Block(kind="heading", text=text[2:], level=4)
        elif text.startswith((" ", "\t")) and not text.lstrip().startswith(("- ", "* ")):
            yield Block(kind="code", text=text)
        elif text.strip():
            yield Block(kind="text", text=text)


def go_documents(source: str, path: str) -> Iterator[str]:
    """Documents of one file: its comments under ``package: file`` as title."""
    if re.search(r"^// Code generated .* DO NOT EDIT", source, re.MULTILINE):
        return
    package, _, file = path.rpartition("/")
    blocks: list[Block] = []
    for declaration, lines in _comments(source):
        match = _DECLARED.match(declaration)
        if match and (match[1] == "package" or len(" ".join(lines)) >= SHORTEST):
            blocks += _blocks(lines)
    yield from sections(blocks, f"Go package {package}: {file.removesuffix('.go').replace('_', ' ')}")
