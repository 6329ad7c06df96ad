"""The command: what it prints, its exit codes, and what it says of mistakes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen.command import COMMANDS, main
from loadgen.null.behaviour import Behaviour, Faults
from loadgen.null.command import run_loop
from loadgen.null.server import serve
from loadgen.results import read_run


@contextmanager
def null(behaviour: Behaviour) -> Iterator[str]:
    """A null server on a thread of its own, which ends with the tests."""
    ports: list[int] = []
    ready = threading.Event()

    def note(port: int) -> None:
        ports.append(port)
        ready.set()

    work = serve(behaviour, host="127.0.0.1", port=0, on_ready=note)
    threading.Thread(target=run_loop, args=(work,), daemon=True).start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{ports[0]}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with null(Behaviour(first_s=0.002)) as found:
        yield found


RUN = ("--requests", "20", "--concurrency", "4")


def test_a_run_prints_and_writes_its_figures(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, answers = tmp_path / "run.json", tmp_path / "answers.jsonl"
    options = ("--slo", "ttft:p50<10s", "--out", str(out), "--record-answers", str(answers), "--label", "first")
    assert main(["run", url, *RUN, *options]) == 0
    printed = capsys.readouterr().out
    assert "20 (100 %)" in printed
    assert "SLO met: TTFT p50" in printed
    run = read_run(out)
    assert (run.counts.ok, run.label, run.target.server) == (20, "first", "null")
    assert run.settings["command"] == [url, *RUN, *options]
    assert main(["run", url, *RUN, "--check", str(answers), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    with null(Behaviour(faults=Faults(wrong=0.5))) as wrong:
        assert main(["run", wrong, *RUN, "--check", str(answers), "--warm-up", "0"]) == 1
        assert "WRONG" in capsys.readouterr().out
        assert main(["run", wrong, *RUN, "--check", str(answers), "--allow-wrong", "1", "--quiet"]) == 0


def test_exit_codes_say_what_is_wrong(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", url, *RUN, "--slo", "e2e:p50<1ms", "--quiet"]) == 1
    assert main(["run", url, "--rate", "50", "--requests", "20", "--lag-limit", "0ms"]) == 3
    assert "INVALID: The figures say nothing of the server: requests were sent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "when requests are due"),
        (("--rate", "5"), "no end"),
        (("--rate", "x"), "no rate"),
        (("--rate", "inf"), "--requests N"),
        (("--rate", "5", "--concurrency", "2", "--requests", "3"), "contradict"),
        (("--trace", "none.csv"), "Cannot read the trace"),
        (("--workload", "hot-experts", "--rate", "5", "--requests", "2"), "--hot-experts"),
        (("--workload", "file", "--rate", "5", "--requests", "2"), "--prompts FILE"),
        (("--rate", "5", "--requests", "2", "--body", "[]"), "no JSON object"),
        (("--rate", "5", "--requests", "2", "--model", "other"), "serves null"),
        (("--rate", "5", "--requests", "2", "--shard", "0/2"), "--start-at"),
        (("--rate", "5", "--requests", "2", "--slo", "fast"), "no objective"),
        (("--rate", "5", "--requests", "2", "--check", "none"), "Cannot read the answers"),
        (("--rate", "5", "--requests", "2", "--slo", "ttft:p9<1s", "--confidence", "1"), "no confidence"),
        (("--rate", "5", "--requests", "2", "--out", "/dev/null/run.json"), "Cannot write"),
        (("--rate", "5", "--requests", "2", "--ca-file", "none.pem"), "no certificates"),
        (("--rate", "5", "--requests", "2", "--api-key-file", sys.executable), "Cannot read the key"),
        (("--rates", "5"), "--help"),
    ],
)
def test_mistakes_are_named(url: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", url, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_or_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "http://127.0.0.1:1", *RUN]) == 2
    assert "does not answer" in capsys.readouterr().err
    with null(Behaviour(faults=Faults(failed=1.0))) as failing:
        assert main(["run", failing, *RUN]) == 2
    assert "does not answer a request (http 500)" in capsys.readouterr().err


def test_files_and_ports_that_are_not_to_be_had_are_named(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["null", "--port", url.rpartition(":")[2]]) == 2
    assert "Cannot listen" in capsys.readouterr().err
    out = tmp_path / "run.json"
    assert main(["run", url, *RUN, "--out", str(out), "--quiet"]) == 0
    assert main(["report", str(out), "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory.\n"


def test_a_search_and_a_sweep_write_what_they_found(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["--probe-seconds", "0.5", "--max-probe-seconds", "0.5", "--lag-limit", "1000ms", "--out", str(out)]
    slo = ["--slo", "ttft:p50<5s", "--start", "40", "--max-rate", "80"]
    assert main(["search", url, *words, *slo]) == 0
    assert "The SLO is kept up to 80 requests a second" in capsys.readouterr().out
    assert [probe["rate"] for probe in json.loads(out.read_bytes())["probes"]] == [40.0, 80.0, 80.0], (
        "looked at on the way up, then measured"
    )
    assert main(["sweep", url, "--concurrencies", "1,4", "--probe-seconds", "0.3", "--out", str(out)]) == 0
    points = json.loads(out.read_bytes())["points"]
    assert [point["load"] for point in points] == [1.0, 4.0]
    assert any(point.get("pareto") for point in points)
    assert main(["search", url]) == 2
    assert main(["sweep", url]) == 2


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in ("run", "search", "sweep", "merge", "record", "null"):
        assert COMMANDS[name].about in overview
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"expertmesh-load {name}" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["rnu"]) == 2
    assert "no command 'rnu'" in capsys.readouterr().err
