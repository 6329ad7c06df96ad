"""``data.py`` from packages to shards, without a network: the same bytes twice, and errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from testkit.pocket.evidence import EXAMPLE, script
from testkit.pocket.packages import SOURCES, TOPICS, write_packages

from pocket_moe.corpus.manifest import licence_text
from pocket_moe.corpus.packages import Packages
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.readers.sources import Source, load_sources

Gather = Callable[..., int]
GRANTED = "Permission is hereby granted.\n\nWithout warranty."


def made(work: Path) -> dict[str, str]:
    files = [path for path in work.rglob("*") if path.is_file() and "unpacked" not in path.parts]
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_packages_give_the_same_bytes_with_every_document_under_its_domain(
    tmp_path: Path, gather: Gather
) -> None:
    work = tmp_path / "second"
    write_packages(work)
    assert gather("--vocab", "340", "--work", str(work)) == 0
    second = made(work)
    shutil.rmtree(work)
    assert gather("--vocab", "340") == 0
    assert made(tmp_path) == second
    assert {"shards/train.tokens.bin", "tokenizer/tokenizer.json", "text/heldout/manual.jsonl"} <= second.keys()
    train, heldout = Shards(tmp_path / "shards", "train"), Shards(tmp_path / "shards", "heldout")
    assert train.meta.domains == ["dictionary", "manual", "pod"]
    assert len(train.domain) + len(heldout.domain) == 3 * len(TOPICS)
    ends = train.tokens[train.starts[1:] - 1]
    assert (ends == train.meta.eos_id).all()
    assert (train.tokens == train.meta.eos_id).sum() == len(train.domain)


def test_the_manifest_names_the_licence_and_its_words(tmp_path: Path, gather: Gather) -> None:
    assert gather("--packages", "dict-sea") == 0
    (row,) = json.loads((tmp_path / "manifest.json").read_text())["sources"]
    said = {"package": "dict-sea", "version": "1.0-1", "licence": "MIT", "documents": len(TOPICS)}
    said |= {"licence_file": "usr/share/doc/dict-sea/copyright", "licence_text": GRANTED}
    assert said.items() <= row.items()


RESTRICTED = {
    "anchor": "under CC-BY-SA 4.0",
    "mast": "Attribution-ShareAlike",
    "keel": "the GNU Free\n Documentation License",
    "tide": '<a href="https://creativecommons.org/licenses/by-nc/4.0/">',
}


def test_pages_that_name_a_share_alike_licence_are_left_out(
    tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "unpacked/sea-doc/usr/share/doc/sea-doc/html"
    for topic, words in RESTRICTED.items():
        with (html / f"{topic}.html").open("a") as page:
            page.write(f"<footer>{words}</footer>")
    with (tmp_path / "unpacked/sea-perl/usr/share/perl/crew.pod").open("a") as manual:
        manual.write("\n=for comment NonCommercial\n")
    assert gather() == 0
    rows = json.loads((tmp_path / "manifest.json").read_text())["sources"]
    assert [row["left_out"] for row in rows] == [0, len(RESTRICTED), 1]
    assert [row["documents"] for row in rows] == [len(TOPICS), len(TOPICS) - len(RESTRICTED), len(TOPICS) - 1]
    text = "".join(path.read_text() for path in (tmp_path / "text").glob("*/manual.jsonl"))
    shown = capsys.readouterr().out
    for topic in TOPICS:
        assert (f"{topic.title()}\\n" in text) == (topic not in RESTRICTED), topic
        assert (f"html/{topic}.html left out, it names " in shown) == (topic in RESTRICTED), topic


def test_the_shipped_manifest_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, data = write_packages(tmp_path), script("data")
    monkeypatch.setattr(data, "HERE", tmp_path / "here")
    (tmp_path / "here").mkdir()
    sources.rename(tmp_path / "here/sources.toml")
    assert data.main(["--work", str(tmp_path), "--offline", "--vocab", "340"]) == 0
    assert (tmp_path / "manifest.json").is_file()
    assert not (tmp_path / "here/manifest.json").exists()


def test_a_missing_package_is_named(tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unpacked/sea-doc/VERSION").unlink()
    assert gather() == 1
    shown = capsys.readouterr().err
    assert "error: The package sea-doc is not in" in shown
    assert "apt-get update" in shown


def test_a_machine_without_apt_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PocketError, match="dict-wn cannot be downloaded: there is no apt-get"):
        Packages(tmp_path, offline=False, report=print).get("dict-wn")


def test_too_little_text_and_unknown_packages(gather: Gather, capsys: pytest.CaptureFixture[str]) -> None:
    assert gather("--vocab", "8192") == 1
    assert "too small for a tokenizer of 8192 entries" in capsys.readouterr().err
    assert gather("--packages", "no-such") == 1
    said = capsys.readouterr().err
    assert "has no package no-such" in said
    assert "--packages names what to keep, such as " in said


def test_the_list_of_sources_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text('[[source]]\ndomain = "d"\nlicense = "MIT"\n')
    with pytest.raises(PocketError, match="license, package, licence, notice, format, files"):
        load_sources(path)


def test_the_shipped_list_has_permissive_licences_alone() -> None:
    allowed = {
        *("MIT", "MIT OR Apache-2.0", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause"),
        *("PSF-2.0", "PostgreSQL", "Artistic-1.0-Perl", "LicenseRef-public-domain", "LicenseRef-WordNet-3.0"),
        "LicenseRef-KJV-legend",
    }
    sources = load_sources(EXAMPLE / "sources.toml")
    assert {source.licence for source in sources} <= allowed
    assert all(source.notice for source in sources)


def test_a_licence_without_parts_is_given_whole() -> None:
    source = Source(domain="d", package="p", licence="MIT", notice="n", format="html", files=[])
    assert licence_text("Free text, short.", source) == "Free text, short."


def test_fewer_packages_do_not_replace_the_text_of_more(
    tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gather("--packages", "sea-doc") == gather("--packages", "sea-doc") == gather() == 0, "the same, or more, do"
    assert (tmp_path / "text/train/pod.jsonl").is_file()
    other = tmp_path / "other.toml"
    other.write_text(SOURCES.replace('domain = "pod"', 'domain = "manual"'))
    before = made(tmp_path)
    for options in (("--packages", "dict-sea,sea-doc"), ("--sources", str(other))):
        assert gather(*options) == 1
        said = capsys.readouterr().err
        assert "holds the text of 3 sources; 1 of them would be lost, such as sea-perl" in said
        assert "another --work" in said
    assert made(tmp_path) == before
    (tmp_path / "manifest.json").unlink()
    assert gather("--packages", "sea-doc") == 0, "what the message names lets fewer through"


@pytest.mark.parametrize("damaged", ['{"sources": [', "{}", '{"sources": [1]}', "[]"])
def test_a_damaged_manifest_is_named(
    tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    (tmp_path / "manifest.json").write_text(damaged)
    assert gather() == 1
    said = capsys.readouterr().err
    assert "manifest.json cannot be read" in said
    assert "Delete it" in said
