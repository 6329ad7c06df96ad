"""Words that this project once used where the field has its own are not used again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from services.config import RENAMED

ROOT = Path(__file__).parents[3]
RETIRED = {
    r"climb(s|ed|ing)?": "forward",
    r"rehears\w*": "warm up, or capture",
    r"obituar(y|ies)": "death notice",
    r"farewells?": "deregister",
    r"musters?": "join queue",
    r"tempo": "join policy",
    r"riders?": "extension",
    r"knobs?": "setting",
    r"_?twins?": "reference",
    r"ledger": "in-flight requests",
    r"recut(ter)?": "repartition",
    r"heed(s|ed)?": "process, observe",
    r"reckon(s|ed|ing)?": "estimate",
    r"(can|to) be had": "is available",
    r"strains?": "peak load",
    r"on_duty": "run_role_service",
    r"(?<![.'\"])(told|tells?|telling)": "report, say, know",
    r"anew": "again, from scratch",
    r"(_)?patien(t|ce)(_s)?": "timeout, grace period",
    r"guests?": "client",
    r"strangers?": "unknown client or request",
    r"(?<!['\"])spoil(s|t|ed)?": "invalidate, corrupt",
    r"starv(es|ed|ing|e)": "wait, get nothing",
    r"(?<!['\"])blam(e|es|ed)": "hold responsible, suspect",
    r"linger(s|ed|ing)?": "wait for peers to drain",
    r"fewest": "least, minimum",
    r"tickets?": "memory handle",
    r"(attention worker of both kinds|by turns|made-up requests?)": "colocated, alternately, dummy requests",
    r"donors?": "weight sources",
    r"pulse": "heartbeats",
    r"hung": "stuck, published",
    r"take_down": "withdraw",
    r"Symm(Link|Host|Lane|Handle|Options)": "SharedMemory...",
    r"Mesh(Broken|Left|Experts|Observer|Routes|Shape|Traffic)": "Lockstep...",
    r"_?(MOST|FEWEST)_\w+": "MAX_, MIN_",
}
"""Pattern of whole words, any case where it is in lower case -> what is said instead. Names in quotes that processes of
earlier releases read stay."""
ALLOWED = (
    "docs/glossary.md",
    "CHANGELOG.md",
    "examples/",
    "services/placement/",  # hill climbing
    "tests/unit/docs/",
    "tests/flow/test_openai_client.py",  # says what a user says
    "tests/testkit/processes/release_peer.py",  # names modules of the last release, too
)
_KINDS = (".py", ".md", ".lua", ".yaml", ".tpl", ".toml", "Makefile")


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: its files cannot be listed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    mine = [file for file in listed if file.endswith(_KINDS) and not file.startswith(ALLOWED)]
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in mine if (ROOT / file).is_file()}


@pytest.mark.parametrize("word", RETIRED)
def test_it_is_not_used(ours: dict[str, str], word: str) -> None:
    upper = any(letter.isupper() for letter in word)
    pattern = re.compile(rf"(?<![\w-]){word}(?!\w)", 0 if upper else re.IGNORECASE)
    found = [
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for file, text in ours.items()
        for match in pattern.finditer(text)
    ]
    assert not found, f"say {RETIRED[word]!r}"


def test_the_files_are_found(ours: dict[str, str]) -> None:
    assert {"README.md", "services/attention/step/engine.py", "services/queue/lua/admit.lua"} <= ours.keys()


def test_no_text_names_an_option_of_an_earlier_release(ours: dict[str, str]) -> None:
    """Options of other tools that have such a name are not meant."""
    others = {"experts", "gpu", "ranks", "kubernetes"}
    names = [name for name in RENAMED if name not in others]
    pattern = re.compile(rf"(--({'|'.join(names).replace('_', '-')})|config[.]({'|'.join(names)}))(?![\w-])")
    found = [f"{file}: {match[0]}" for file, text in ours.items() for match in pattern.finditer(text)]
    assert not found, "services/config/renamed.py says what to write instead"
