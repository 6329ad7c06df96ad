"""``data.py`` in a folder that has text already: the same packages or more replace it, fewer do not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from testkit.pocket.evidence import script
from testkit.pocket.packages import SOURCES, write_packages

Gather = Callable[..., int]


@pytest.fixture
def gather(tmp_path: Path) -> Gather:
    write_packages(tmp_path)
    data = script("data")

    def run(*options: str) -> int:
        fixed = ["--work", str(tmp_path), "--offline", "--sources", str(tmp_path / "sources.toml"), "--vocab", "300"]
        status: int = data.main([*fixed, *options])
        return status

    return run


def made(work: Path) -> dict[Path, str]:
    files = [path for part in ("text", "shards", "tokenizer") for path in (work / part).rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in [*files, work / "manifest.json"]}


def test_fewer_packages_do_not_replace_the_text_of_more(
    tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gather() == 0
    before = made(tmp_path)
    other = tmp_path / "other.toml"
    other.write_text(SOURCES.replace('domain = "pod"', 'domain = "manual"'))
    for options in (("--packages", "dict-sea,sea-doc"), ("--sources", str(other))):
        assert gather(*options) == 1
        said = capsys.readouterr().err
        assert "holds the text of 3 sources; 1 of them would be lost, such as sea-perl" in said
        assert "another --work" in said
    assert made(tmp_path) == before


def test_the_same_or_more_packages_replace_it(tmp_path: Path, gather: Gather) -> None:
    assert gather("--packages", "sea-doc") == 0
    assert gather("--packages", "sea-doc") == 0
    assert gather() == 0
    assert (tmp_path / "text/train/pod.jsonl").is_file()


def test_what_the_message_names_lets_fewer_through(tmp_path: Path, gather: Gather) -> None:
    assert gather() == 0
    (tmp_path / "manifest.json").unlink()
    assert gather("--packages", "sea-doc") == 0


@pytest.mark.parametrize("damaged", ['{"sources": [', "{}", '{"sources": [1]}', "[]"])
def test_a_damaged_manifest_is_named(
    tmp_path: Path, gather: Gather, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    (tmp_path / "manifest.json").write_text(damaged)
    assert gather() == 1
    said = capsys.readouterr().err
    assert "manifest.json cannot be read" in said
    assert "Delete it" in said
