"""What bench.run, bench.tune and bench.verify refuse: with exit code 2 and what is allowed, before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import arguments, run, tune, verify
from bench.shapes import find

COMMANDS = {"run": run.main, "tune": tune.main, "verify": verify.main}


@pytest.mark.parametrize(
    ("text", "message", "commands"),
    [
        ("--op nope", "unknown nope; known: ", "run tune"),
        ("--op ,", "name at least one", "run tune"),
        ("--dtype bf16,int3", "unknown int3; known: bf16, fp16", "run tune"),
        ("--provider nope", "unknown nope; known: ours, ours_weight_only, vllm", "run"),
        ("--shape nope", "no shape 'nope'; known: mixtral, qwen3-30b", "run tune"),
        ("--shape tiny/0", "no shape 'tiny/0'", "run tune"),
        ("--shape tiny,mixtral/x", "NAME/DIVISOR, a divisor of at least 1", "run tune"),
        ("--rows=-3", "'-3' is not a whole number of at least 1", "run tune"),
        ("--rows 8,0", "'0' is not a whole number of at least 1", "run tune"),
        ("--rows x", "'x' is not a whole number of at least 1", "run tune"),
        ("--scale 0", "'0' is not a whole number of at least 1", "run verify"),
        ("--tokens 0", "'0' is not a whole number of at least 1", "run"),
        ("--show=-1", "'-1' is not a whole number of at least 0", "verify"),
        ("--jobs 0", "'0' is not a whole number of at least 1", "run tune verify"),
        ("--device tpu", "'tpu' is neither cuda nor cpu", "run tune verify"),
        ("--device cuda", "torch finds no GPU here", "run tune verify"),
        ("--budget-s 0", "'0' is not a number of seconds above 0", "run tune"),
        ("--budget-s=-1", "'-1' is not a number of seconds above 0", "run tune"),
        ("--budget-s nan", "'nan' is not a number of seconds above 0", "run tune"),
        ("--case-s inf", "'inf' is not a number of seconds above 0", "tune"),
    ],
)
def test_refusals_say_what_is_allowed(
    text: str, message: str, commands: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in commands.split():
        main: Callable[[list[str]], int] = COMMANDS[command]
        with pytest.raises(SystemExit) as ended:
            main(text.split())
        assert ended.value.code == 2, command
        said = capsys.readouterr().err
        assert f"bench.{command}: error: argument {text.replace('=', ' ').split()[0]}: " in said
        assert message in said, command


def test_what_is_allowed_is_read() -> None:
    assert arguments.names(["a", "b"])(" b, a,") == ["b", "a"]
    assert arguments.rows("1, 2048") == [1, 2048]
    assert arguments.whole(0)("0") == 0
    assert arguments.seconds("0.5") == 0.5
    assert arguments.device("cpu") == "cpu"
    assert arguments.shapes("tiny,mixtral/32") == [find("tiny"), find("mixtral").scaled(32)]
