"""Perl's documentation format, POD, in; documents of readable text out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pocket_moe.readers.text import Block, sections

ENTITIES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "eacute": "é", "auml": "ä", "amp": "&", "quot": '"'}
_CODE = re.compile(r"([A-Z])(?:<<+\s((?:(?!<<).)*?)\s>>+|<([^<>]*)>)", re.DOTALL)
_LINK = re.compile(r'(?:[^|]*\|)?"?(.*?)"?$', re.DOTALL)


def _replace(match: re.Match[str]) -> str:
    letter, text = match[1], match[2] if match[2] is not None else match[3]
    if letter in "XZ":
        return ""
    if letter == "E":
        return _entity(text)
    return _link(text) if letter == "L" else text.replace("<", "\x01").replace(">", "\x02")


def _entity(name: str) -> str:
    known = ENTITIES.get(name, "")
    return known.replace("<", "\x01").replace(">", "\x02")


def _link(target: str) -> str:
    """``text|page`` shows its text; ``page/"Section"`` reads as 'Section in page'."""
    text, bar, _ = target.partition("|")
    if bar:
        return text
    page, slash, section = target.partition("/")
    section = section.strip('"')
    if not slash or "://" in target:
        return target.strip('"')
    return f"“{section}” in {page}" if page else f"“{section}”"


def plain(text: str) -> str:
    """A paragraph without its formatting codes, the innermost replaced first."""
    while True:
        replaced = _CODE.sub(_replace, text)
        if replaced == text:
            return text.replace("\x01", "<").replace("\x02", ">")
        text = replaced


def _blocks(source: str) -> Iterator[Block]:
    """Paragraphs of POD are set apart by empty lines; a verbatim one is indented."""
    skipping = False
    item = False
    for part in re.split(r"\n\s*\n", source.strip("\n")):
        if part.startswith("="):
            command, _, rest = part.lstrip("=").partition(" ")
            command = command.split("\n", 1)[0]
            skipping = command == "begin" or (skipping and command != "end")
            item = command == "item" and rest.strip(" \n") in ("*", "o", "-", "")
            yield from _command(command, plain(rest))
        elif not skipping and part.strip():
            verbatim = part.startswith((" ", "\t"))
            yield Block(kind="code" if verbatim else "item" if item else "text", text=part if verbatim else plain(part))
            item = False


def _command(command: str, text: str) -> Iterator[Block]:
    if re.fullmatch(r"head[1-4]", command):
        heading = " ".join(text.split())
        yield Block(kind="heading", text=heading.capitalize() if heading.isupper() else heading, level=int(command[-1]))
    elif command == "item":
        label = re.sub(r"^(\*|\d+\.?)(\s+|$)", "", text.strip())
        if label:
            yield Block(kind="item" if len(label.split()) > 6 else "term", text=label)


def pod_documents(source: str, title: str) -> Iterator[str]:
    """Documents of one POD file; ``title`` heads the first where the file itself does not."""
    name = re.search(r"^=head1 NAME\s+(.+?)\s*$", source, re.MULTILINE)
    body = source[name.end() :] if name else source
    blocks = [block for block in _blocks(body) if not (block.kind == "heading" and block.text == "Description")]
    return sections(blocks, plain(name[1]) if name else title)
