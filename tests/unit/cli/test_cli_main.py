"""Finding the command, the light ones, and what a mistake looks like to a user."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.cli import main as cli
from services.cli.main import COMMANDS, Command, main

HEAVY = ("torch", "transformers", "pydantic", "fastapi", "redis")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Commands that would have run."""
    seen: list[tuple[str, list[str]]] = []

    def stand_in(name: str) -> Command:
        def run(argv: Sequence[str]) -> int:
            seen.append((name, list(argv)))
            return 0

        return Command("", run)

    monkeypatch.setattr(cli, "COMMANDS", {name: stand_in(name) for name in COMMANDS})
    return seen


def test_serve_is_the_default(calls: list[tuple[str, list[str]]]) -> None:
    assert main(["--model", "m"]) == 0
    assert main([]) == 0
    assert main(["gateway", "--model", "m"]) == 0
    assert calls == [("serve", ["--model", "m"]), ("serve", []), ("gateway", ["--model", "m"])]


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gatway"]) == 2
    assert capsys.readouterr().err == "expertmesh: Unknown command 'gatway'. Did you mean gateway?\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"version"}))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: expertmesh {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["gateway", "scheduler", "attention"])
def test_a_role_and_its_module_are_the_same(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--prot", "1"]) == 2
    from_cli = capsys.readouterr().err
    module = subprocess.run(
        [sys.executable, "-m", f"services.{command}", "--prot", "1"], capture_output=True, text=True, check=False
    )
    assert (module.returncode, module.stderr) == (2, from_cli)
    assert "Unknown option --prot." in from_cli


def test_version_is_light() -> None:
    code = f"import sys; from services.cli.main import main; main(['version']); print({set(HEAVY)} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    version, heavy = said.splitlines()
    assert version.startswith("expertmesh ")
    assert heavy == "set()"


@pytest.mark.parametrize(("pid", "code"), [(1, 128 + signal.SIGTERM), (2, -signal.SIGTERM)])
def test_the_first_process_of_a_container_ends_at_sigterm_though_its_role_still_loads(pid: int, code: int) -> None:
    """There the kernel drops a signal without a handler: what ends process 2 must be a handler in process 1."""
    lines = f"""
import os, time
os.getpid = lambda: {pid}
from services.cli import main as cli
cli.COMMANDS["load"] = cli.Command("", lambda _: print("loading", flush=True) or time.sleep(60))
cli.main(["load"])
"""
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(30) == code


def test_serve_without_a_model_says_what_to_do() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "services", "--log-format", "text"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "Give its folder with --model DIR." in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_config_shows_values_and_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("block_size: 32")
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://:hunter2@h/0")
    assert main(["config", "--json", "--config", str(file), "--port", "9"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 9, "from": "--port"}
    assert shown["block_size"] == {"value": 32, "from": str(file)}
    assert shown["redis_url"] == {"value": "redis://:***@h/0", "from": "EXPERTMESH_REDIS_URL"}
    assert shown["lease"]["from"] == "default"
    assert main(["config"]) == 0
    table = capsys.readouterr().out
    assert "hunter2" not in table
    (row,) = [line for line in table.splitlines() if line.startswith("redis_url ")]
    assert row.split() == ["redis_url", "redis://:***@h/0", "EXPERTMESH_REDIS_URL"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    ran = subprocess.run(
        f"{sys.executable} -m services config | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("0\n", "")


def test_demo_model_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[Path, str]] = []
    monkeypatch.setattr("services.demo.checkpoint.make_demo_model", lambda *arguments: made.append(arguments))
    assert main(["demo-model", str(tmp_path / "m"), "--dtype", "bfloat16"]) == 0
    assert made == [(tmp_path / "m", "bfloat16")]
    assert f"expertmesh serve --model {tmp_path / 'm'}" in capsys.readouterr().out
    assert main(["demo-model"]) == 2
    assert main(["demo-model", "x", "--dtype", "int3"]) == 2
