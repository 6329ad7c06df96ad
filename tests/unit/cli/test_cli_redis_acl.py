"""`expertmesh redis-acl`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.main import main
from services.queue.acl import RULES, hashed

PASSWORD = "p" * 24


def test_it_prints_all_users_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["redis-acl", "--namespace", "mesh"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == list(RULES)
    assert not [line for line in lines if "#" in line or "nopass" in line]
    assert "~{mesh}:seat:*" in lines[list(RULES).index("experts")]


def test_it_prints_hashes_of_the_passwords_in_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text(PASSWORD + "\n")
    words = ["redis-acl", "gateway", "--passwords", str(tmp_path), "--user-prefix", "a-", "--redis-version", "6.2.14"]
    assert main(words) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"user a-gateway on #{hashed(PASSWORD)} resetchannels ~{{expertmesh}}: ")
    assert "%R" not in line
    assert PASSWORD not in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chef"], "There is no role 'chef'. Roles are gateway, scheduler"),
        (["--redis-version", "new"], "'new' is no version of Redis"),
        (["experts", "--passwords", "{here}"], "Cannot read the password of experts"),
        (["gateway", "--passwords", "{here}"], "has fewer than 16 characters"),
        (["--namespace", "a b"], "--namespace is 'a b'"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gateway").write_text("short")
    assert main(["redis-acl", *(word.format(here=tmp_path) for word in words)]) != 0
    assert says in capsys.readouterr().err
