"""Every Markdown file is wrapped by one rule, and its links lead somewhere. The example's records are generated."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from testkit.docs.markdown import wrapped

ROOT = Path(__file__).parents[3]
MADE = (*(f"examples/pocket-moe/{part}" for part in ("model/", "speculators/", "MODEL_CARD.md")), "manifests/")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def files() -> list[str]:
    if not (ROOT / ".git").exists():
        return [str(file.relative_to(ROOT)) for file in ROOT.glob("*.md")]
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for file in listed.stdout.split() if not file.startswith(MADE)]


@pytest.mark.parametrize("file", files())
def test_it_is_wrapped_by_the_rule(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert wrapped(text) == text, f"PYTHONPATH=tests python -m testkit.docs.markdown {file} wraps it"


@pytest.mark.parametrize("file", files())
def test_its_links_lead_to_files(file: str) -> None:
    links = [link for link in _LINK.findall((ROOT / file).read_text(encoding="utf-8")) if "://" not in link]
    lost = [link for link in links if not ((ROOT / file).parent / link).exists()]
    assert not lost


LONG = "word " * 40


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("a\nb\n", "a b\n"),
        ("- a\n  b\n- c\n", "- a b\n- c\n"),
        ("# a\nb\n", "# a\nb\n"),
        ("| a |\n| b |\n", "| a |\n| b |\n"),
        ("```\na\nb\n```\n", "```\na\nb\n```\n"),
        ("a\n\n    code\n    more\n", "a\n\n    code\n    more\n"),
        (LONG + "- x\n", f"{' '.join(['word'] * 23)} word\n{' '.join(['word'] * 15)} word - x\n"),
    ],
)
def test_the_rule(text: str, becomes: str) -> None:
    assert wrapped(text) == becomes
    assert wrapped(becomes) == becomes
