"""`expertmesh redis-acl`: what it prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.queue.acl import RULES, hashed

PASSWORD = "p" * 24
Run = Callable[..., Any]


def test_it_prints_all_users_without_passwords(run: Run) -> None:
    lines = run(0, "redis-acl", "--namespace", "mesh").out.splitlines()
    assert [line.split()[1] for line in lines] == list(RULES)
    assert not [line for line in lines if "#" in line or "nopass" in line]
    assert "~{mesh}:seat:*" in lines[list(RULES).index("experts")]


def test_it_prints_hashes_of_the_passwords_in_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text(PASSWORD + "\n")
    words = ("gateway", "--passwords", str(tmp_path), "--user-prefix", "a-", "--redis-version", "6.2.14")
    [line] = run(0, "redis-acl", *words).out.splitlines()
    assert line.startswith(f"user a-gateway on #{hashed(PASSWORD)} resetchannels ~{{expertmesh}}: ")
    assert "%R" not in line
    assert PASSWORD not in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chef"], "There is no role 'chef'. Roles are gateway, scheduler"),
        (["--redis-version", "new"], "'new' is not a Redis version"),
        (["experts", "--passwords", "{here}"], "Cannot read the password of experts"),
        (["gateway", "--passwords", "{here}"], "has fewer than 16 characters"),
        (["--namespace", "a b"], "--namespace is 'a b'"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text("short")
    assert says in run(2, "redis-acl", *(word.format(here=tmp_path) for word in words)).err
