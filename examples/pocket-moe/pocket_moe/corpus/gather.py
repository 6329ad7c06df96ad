"""All sources in, ``text/{train,heldout}/<domain>.jsonl`` and the manifest out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from pocket_moe.corpus.dedupe import Deduper, unlike
from pocket_moe.corpus.manifest import Part, part, write_manifest
from pocket_moe.corpus.packages import Package, Packages
from pocket_moe.corpus.split import Split, split_documents, split_entries
from pocket_moe.errors import PocketError
from pocket_moe.readers.formats import read_entries, read_file, restricted_licence
from pocket_moe.readers.sources import Source, source_files
from pocket_moe.readers.text import Document

SPLITS = ("train", "heldout")
MILLION = 1_000_000


class Gatherer:
    """Cleans, removes duplicates and splits, one domain after the other."""

    def __init__(self, work: Path, packages: Packages, report: Callable[[str], None]) -> None:
        self._text, self._manifest = work / "text", work / "manifest.json"
        self._packages, self._report = packages, report
        self._deduper = Deduper()

    def run(self, sources: Sequence[Source]) -> None:
        """Writes the text of ``sources`` and their manifest.

        Raises:
            PocketError: a package or its files cannot be had.
        """
        parts: list[Part] = []
        splits: dict[str, Split] = {}
        order = list(dict.fromkeys(source.domain for source in sources))
        ordered = sorted(sources, key=lambda source: order.index(source.domain))
        for domain, group in groupby(ordered, key=lambda source: source.domain):
            splits[domain], more = self._domain(domain, list(group))
            parts += more
        shutil.rmtree(self._text, ignore_errors=True)
        dropped = self._write_all(splits)
        write_manifest(parts, dropped, self._manifest)

    def _domain(self, domain: str, sources: list[Source]) -> tuple[Split, list[Part]]:
        splits, parts = [], []
        for source in sources:
            package = self._packages.get(source.package)
            left_out: list[Path] = []
            split = self._split(source, package, left_out)
            if not split.train:
                raise PocketError(
                    f"The package {source.package} gave no text for {domain}.",
                    hint="Check its version and sources.toml.",
                )
            splits.append(split)
            texts = [document.text for document in split.train + split.heldout]
            parts.append(part(source, package, texts, len(left_out)))
            self._report(
                f"{domain}: {source.package} {parts[-1].documents} documents, {parts[-1].bytes / MILLION:.2f} MB"
            )
        train = [document for split in splits for document in split.train]
        return Split(train=train, heldout=[document for split in splits for document in split.heldout]), parts

    def _write_all(self, splits: Mapping[str, Split]) -> dict[str, int]:
        """How many held-out documents of each domain were dropped, for being like what is trained on."""
        self._report("comparing held-out documents with the training text")
        train = (document for split in splits.values() for document in split.train)
        heldout = unlike({domain: split.heldout for domain, split in splits.items()}, train)
        for domain, split in splits.items():
            self._write(domain, "train", split.train)
            self._write(domain, "heldout", heldout[domain])
        return {domain: len(split.heldout) - len(heldout[domain]) for domain, split in splits.items()}

    def _split(self, source: Source, package: Package, left_out: list[Path]) -> Split:
        if source.format == "wordnet":
            file = next(source_files(source, package.root))
            return split_entries(read_entries(file), source.domain, source.package)
        documents = self._deduper.keep(_documents(source, package, self._permitted(source, package, left_out)))
        return split_documents(sorted(documents, key=lambda document: document.id))

    def _permitted(self, source: Source, package: Package, left_out: list[Path]) -> Iterator[Path]:
        """The source's files; those that name a licence of another kind are reported and go to ``left_out``."""
        for file in source_files(source, package.root):
            if licence := restricted_licence(file, source):
                left_out.append(file)
                self._report(f"{source.domain}: {file.relative_to(package.root)} left out, it names {licence}")
            else:
                yield file

    def _write(self, domain: str, split: str, documents: list[Document]) -> None:
        path = self._text / split / f"{domain}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(asdict(document), ensure_ascii=False) for document in documents)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _documents(source: Source, package: Package, files: Iterable[Path]) -> Iterator[Document]:
    """Documents of a source's ``files`` up to its limit, each with an id of its own."""
    size = 0
    used: set[str] = set()
    for file in files:
        for index, (name, text) in enumerate(read_file(file, source)):
            identity = f"{source.package}:{name or f'{file.relative_to(package.root)}#{index}'}"
            while identity in used:
                identity += "'"
            used.add(identity)
            yield Document(id=identity, domain=source.domain, text=text)
            size += len(text.encode())
        if source.limit and size >= source.limit * MILLION:
            return


def read_documents(work: Path, split: str, domain: str) -> Iterator[Document]:
    """What :class:`Gatherer` wrote."""
    with (work / "text" / split / f"{domain}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def domains(work: Path) -> list[str]:
    """The domains of the gathered text, the dictionary first."""
    names = sorted(path.stem for path in (work / "text" / "train").glob("*.jsonl"))
    return sorted(names, key=lambda name: name != "dictionary")
