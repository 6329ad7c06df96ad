"""Gather the pocket model's text, train its tokenizer and write the shards it is trained on.

    python examples/pocket-moe/data.py
    python examples/pocket-moe/data.py --packages dict-wn,dict-devil --work /tmp/pocket
    python examples/pocket-moe/data.py --offline

Needs Debian's apt-get and dpkg-deb, or its packages laid ready in ``<work>/packages``. The same packages give the same
bytes in every file. Everything goes to ``<work>``, the manifest too: ``card.py --collect`` copies that. A part of the
packages wants a folder of its own: it does not replace text and shards that were made of more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pocket_moe.command import WORK, reported
from pocket_moe.corpus.gather import SPLITS, Gatherer, domains, read_documents
from pocket_moe.corpus.packages import Packages
from pocket_moe.corpus.shards import write_shards
from pocket_moe.corpus.tokenizer import END_OF_TEXT, VOCAB_SIZE, balanced, train_tokenizer, write_tokenizer
from pocket_moe.errors import PocketError
from pocket_moe.readers.sources import Source, load_sources

HERE = Path(__file__).resolve().parent


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=WORK, help="the working folder")
    parser.add_argument("--packages", help="only these, separated by commas; with a --work of their own")
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    parser.add_argument("--sources", type=Path, default=HERE / "sources.toml", help="the list of packages")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="entries of the tokenizer")
    return parser.parse_args(arguments)


def _texts(work: Path, split: str, domain: str) -> list[str]:
    return [document.text for document in read_documents(work, split, domain)]


def _require_no_loss(work: Path, sources: list[Source]) -> None:
    """Text and shards that trainings rely on are not replaced by those of fewer packages."""
    manifest = work / "manifest.json"
    held = _held(manifest)
    lost = sorted(package for _, package in held - {(source.domain, source.package) for source in sources})
    if lost:
        raise PocketError(
            f"{work} holds the text of {len(held)} sources; {len(lost)} of them would be lost, such as {lost[0]}.",
            hint=f"Pass another --work, or delete {manifest} to have the text and the shards there replaced.",
        )


def _held(manifest: Path) -> set[tuple[str, str]]:
    """Domain and package of each source whose text was gathered."""
    try:
        return {(row["domain"], row["package"]) for row in json.loads(manifest.read_text("utf-8"))["sources"]}
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError) as error:
        raise PocketError(f"{manifest} cannot be read: {error!r}", hint="Delete it: it is made again.") from error


def make_data(options: argparse.Namespace) -> None:
    """Text, tokenizer, shards."""
    work: Path = options.work.resolve()
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    only = set(options.packages.split(",")) if options.packages else None
    packages = Packages(work, offline=options.offline, report=report)
    sources = load_sources(options.sources, only)
    _require_no_loss(work, sources)
    Gatherer(work, packages, report).run(sources)
    names = domains(work)
    texts = {split: {name: _texts(work, split, name) for name in names} for split in SPLITS}
    report(f"training a tokenizer of {options.vocab} entries")
    write_tokenizer(train_tokenizer(balanced(texts["train"]), options.vocab), work / "tokenizer")
    report("encoding")
    meta = write_shards(work / "shards", work / "tokenizer" / "tokenizer.json", END_OF_TEXT, texts)
    for name in names:
        size = sum(len(text.encode()) for text in texts["train"][name])
        tokens = meta.tokens_by_domain["train"][name]
        report(f"{name:13} {tokens:11,} tokens, {size / tokens:.2f} bytes per token")
    report(f"{meta.tokens['train']:,} tokens to train on, {meta.tokens['heldout']:,} held out")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    options = _options(arguments)
    return reported(lambda: make_data(options))


if __name__ == "__main__":
    sys.exit(main())
