"""The choice of a command's command: what is printed, and with which exit code."""

from __future__ import annotations

import pytest

from services.config import chosen
from services.errors import ConfigError

COMMANDS = {"up": 1, "status": 2}


def test_the_first_word_chooses() -> None:
    assert chosen("expertmesh ray", ["status", "--help"], COMMANDS, "usage: ...") == 2


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0), (["-h", "up"], 0), (["help"], 0)])
def test_its_usage_is_printed(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        chosen("expertmesh ray", argv, COMMANDS, "usage: ...")
    assert (end.value.code, capsys.readouterr().out) == (code, "usage: ...\n")


@pytest.mark.parametrize(("word", "hint"), [("statu", "Did you mean status?"), ("xyz", "See `expertmesh ray --help`.")])
def test_a_word_that_is_none_is_named(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen("expertmesh ray", [word], COMMANDS, "usage: ...")
    assert refused.value.message == f"There is no `expertmesh ray {word}`. {hint}"
