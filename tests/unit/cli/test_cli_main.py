"""Finding the command, the light ones, and what a mistake looks like to a user."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from services.cli import main as cli
from services.cli.main import COMMANDS, Command, main
from services.config import TOPICS, Settings, is_hidden

Run = Callable[..., Any]
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


def test_an_unknown_command_names_the_nearest(run: Run) -> None:
    assert run(2, "gatway").err == "expertmesh: Unknown command 'gatway'. Did you mean gateway?\n"


def test_help_lists_every_command(run: Run) -> None:
    text = run(0, "--help").out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"version"}))
def test_every_command_has_help(command: str, run: Run) -> None:
    text = run(0, command, "--help").out
    assert f"usage: expertmesh {command}" in text
    assert re.findall(r"^  (\S+(?: \S+)*)\n(?! {4})", text, re.MULTILINE) == [], "arguments without a description"


@pytest.mark.parametrize("package", ["torch", "safetensors.torch"])
def test_a_role_without_the_extra_worker_names_it(package: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _cannot_import(package, monkeypatch)
    assert "Run `pip install 'expertmesh[worker]'`" in run(2, "attention").err


def test_another_module_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _cannot_import("services.gone", monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        main(["attention"])


def _cannot_import(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> NoReturn:
        raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(cli.importlib, "import_module", refuse)


@pytest.mark.parametrize("command", ["gateway", "scheduler", "attention"])
def test_a_role_and_its_module_are_the_same(command: str, run: Run) -> None:
    from_cli = run(2, command, "--prot", "1").err
    words = [sys.executable, "-m", f"services.{command}", "--prot", "1"]
    module = subprocess.run(words, capture_output=True, text=True, check=False)
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
    words = [sys.executable, "-m", "services", "--log-format", "text"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "No model is given. Give a checkpoint's folder or ORG/NAME" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_config_shows_values_and_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("block_size: 32")
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://:hunter2@h/0")
    shown = json.loads(run(0, "config", "--json", "--config", str(file), "--port", "9").out)
    assert shown["port"] == {"value": 9, "from": "--port"}
    assert shown["block_size"] == {"value": 32, "from": str(file)}
    assert shown["redis_url"] == {"value": "redis://:***@h/0", "from": "EXPERTMESH_REDIS_URL"}
    assert shown["lease"]["from"] == "default"
    table = run(0, "config").out
    assert "hunter2" not in table
    (row,) = [line for line in table.splitlines() if line.startswith("  redis_url ")]
    assert row.split() == ["redis_url", "redis://:***@h/0", "EXPERTMESH_REDIS_URL"]


def test_config_groups_settings_by_topic(run: Run) -> None:
    lines = run(0, "config", "--node", "n").out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{topic}:" for topic in TOPICS]
    shown = {line.split()[0] for line in lines if line.startswith(" ")}
    hidden = {name for name in Settings.model_fields if is_hidden(name)}
    assert shown == set(Settings.model_fields) - hidden | {"node"}, "a hidden setting is shown where it is set"
    every = run(0, "config", "--internal").out.splitlines()
    assert {line.split()[0] for line in every if line.startswith(" ")} == set(Settings.model_fields)


def test_config_shows_what_differs_from_the_defaults(run: Run) -> None:
    words = ("--changed", "--port", "8000", "--block-size", "32", "--supervisor-pid", "7")
    rows = [line.split() for line in run(0, "config", *words).out.splitlines()]
    assert rows == [
        ["Memory", "and", "batching:"],
        ["block_size", "32", "--block-size"],
        ["Observability:"],
        ["supervisor_pid", "7", "--supervisor-pid"],
    ]
    assert list(json.loads(run(0, "config", "--json", *words).out)) == ["block_size", "supervisor_pid"]
    assert run(0, "config", "--changed").out == "Every setting has its default.\n"


def test_config_dims_defaults_in_a_terminal(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    assert "\x1b" not in run(0, "config").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    lines = run(0, "config", "--port", "8000").out.splitlines()
    [port] = [line for line in lines if "  port " in line]
    [host] = [line for line in lines if "  host " in line]
    assert "\x1b" not in port
    assert host.startswith("\x1b[2m")


@pytest.mark.parametrize("command", ["demo", "config"])
def test_commands_that_take_the_options_of_serve_do_not_list_them_again(command: str, run: Run) -> None:
    text = run(0, command, "--help").out
    assert "Takes the options of `expertmesh serve`, too." in text
    assert "--max-num-seqs N" not in text
    assert len(text.splitlines()) < 30
    assert "--max-num-seqs N" in run(0, command, "--help=all").out


def test_a_reader_that_goes_away_is_no_error() -> None:
    piped = f"{sys.executable} -m services config | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["/bin/bash", "-c", piped], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("0\n", "")


def test_demo_model_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    made: list[tuple[Path, str]] = []
    monkeypatch.setattr("services.demo.checkpoint.make_demo_model", lambda *arguments: made.append(arguments))
    said = run(0, "demo-model", str(tmp_path / "m"), "--dtype", "bfloat16").out
    assert made == [(tmp_path / "m", "bfloat16")]
    assert f"expertmesh serve --model {tmp_path / 'm'}" in said
    run(2, "demo-model")
    run(2, "demo-model", "x", "--dtype", "int3")
