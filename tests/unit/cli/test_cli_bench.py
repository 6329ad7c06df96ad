"""What `expertmesh bench` refuses before it loads or starts anything, what it takes over from `serve`, and Ctrl-C."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from testkit.fake_vllm import python_with_vllm

from services.bench import latency, options, serving
from services.bench.ours import OurEngine
from services.bench.prepare import Prepared
from services.bench.sides import OURS, Limits

Run = Callable[..., Any]
POCKET = str(Path(__file__).parents[3] / "examples/pocket-moe/model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latncy"], "There is no `expertmesh bench latncy`. Did you mean latency?"),
        (["latency"], "It is not said which model."),
        (["latency", "/nowhere/model"], "/nowhere/model is not a folder"),
        (["latency", POCKET, "--batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["latency", POCKET, "--batch-size", "1,64", "--max-num-seqs", "8"], "give --max-num-seqs 64"),
        (["latency", POCKET, "--input-len", "1000", "--output-len", "25"], "1025 tokens together exceed the 1024"),
        (["latency", POCKET, "--max-model-len", "64"], "exceed the 64 that the model takes"),
        (["latency", POCKET, "--output-len", "1"], "'1' is not a whole number of at least 2"),
        (["latency", POCKET, "--layout", "lockstep"], "--layout does not apply"),
        (["latency", POCKET, "--picture", "x.png"], "Give one that ends in .svg"),
        (["latency", POCKET, "--json", "/proc/no/x.json"], "Cannot write /proc/no/x.json"),
        (["latency", POCKET, "--vllm", "python3"], "--vllm and --vllm-options are for a comparison"),
        (["latency", POCKET, "--against", "vllm"], "vLLM is not installed in"),
        (["latency", POCKET, "--against", "vllm", "--vllm", "/nowhere"], "--vllm /path/to/venv/bin/python"),
        (["throughput", POCKET, "--workload", "chats"], "invalid choice: 'chats'"),
        (["throughput", POCKET, "--input-len", "8..4"], "'8..4' is no length"),
        (["throughput", POCKET, "--output-len", "1000"], "exceed the 1024 that the model takes"),
        (["throughput", POCKET, "--dataset-path", "/nowhere.json"], "Cannot read the prompts /nowhere.json"),
        (["serve"], "It is not said which model."),
        (["serve", POCKET, "--load-format", "dummy"], "--load-format is not an option here"),
        (["serve", POCKET, "--request-rate", "fast"], "'fast' is no rate"),
        (["serve", POCKET, "--request-rate", "5", "--max-concurrency", "5"], "Give one of them."),
        (["serve", POCKET, "--goodput", "itl:5"], "'itl:5' is no objective"),
        (["serve", POCKET, "--output-len", "1000"], "exceed the 1024 that the model takes"),
        (["serve", POCKET, "--max-num-seq", "5"], "Did you mean --max-num-seqs?"),
        (["serve", "--url", "http://127.0.0.1:9", "--max-num-seqs", "5"], "--url measures a server that runs"),
        (["serve", "--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(words: list[str], message: str, run: Run) -> None:
    found = run(2 if "/nowhere/model" not in words else 3, "bench", *words)
    assert found.out == ""
    assert message in found.err


def test_one_that_runs_and_vllm_are_not_compared(run: Run, tmp_path: Path) -> None:
    words = ["--url", "http://127.0.0.1:9", "--against", "vllm", "--vllm", str(python_with_vllm(tmp_path))]
    assert "--url does not say where that is" in run(2, "bench", "serve", *words).err


def test_without_a_word_it_says_what_there_is(run: Run) -> None:
    assert "usage: expertmesh bench COMMAND" in run(2, "bench").out
    for name in ("latency", "throughput", "serve"):
        assert f"usage: expertmesh bench {name}" in run(0, "bench", name, "--help").out


def test_usual_batches_are_those_that_there_is_room_for() -> None:
    assert options.batches(options.latency_options([POCKET])) == [1, 8, 32]
    assert options.batches(options.latency_options([POCKET, "--max-num-seqs", "9"])) == [1, 8]
    assert options.batches(options.latency_options([POCKET, "--batch-size", "4,2,4"])) == [4, 2]


def test_serve_passes_on_what_it_was_given() -> None:
    given = options.serve_options(
        [POCKET, "--max-num-seqs", "5", "--no-prefix-cache", "--port", "7", "--num-prompts", "9"]
    )
    found = serving.prepare(given)
    (target,) = found.targets
    assert target.url == "http://127.0.0.1:7"
    words = list(target.command[3:])
    assert words == [
        "serve", "--max-num-seqs", "5", "--no-prefix-cache", "--model", POCKET, "--log-level", "warning",
        "--max-queued-requests", "1024", "--port", "7",
    ]  # fmt: skip


def test_vllm_serves_with_what_means_the_same(tmp_path: Path) -> None:
    python = str(python_with_vllm(tmp_path))
    words = ["--against", "vllm", "--vllm", python, "--vllm-options", "--block-size 32", "--max-model-len", "512"]
    ours, theirs = serving.prepare(options.serve_options([POCKET, *words])).targets
    assert ours.url != theirs.url
    assert list(theirs.command[:6]) == [
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        POCKET,
        "--served-model-name",
    ]
    assert "--max-model-len 512 --gpu-memory-utilization 0.9 --enable-prefix-caching --block-size 32" in " ".join(
        theirs.command
    )


def test_how_much_a_step_of_each_server_takes_is_known_where_it_is_said(tmp_path: Path) -> None:
    words = ["--against", "vllm", "--vllm", str(python_with_vllm(tmp_path)), "--max-num-seqs", "8"]
    options_of_theirs = ["--vllm-options", "--max-num-batched-tokens 4096 --max-num-seqs=9"]
    facts = serving.prepare(options.serve_options([POCKET, *words, *options_of_theirs])).facts
    assert [facts[side].get("max_num_seqs") for side in facts] == [8, 9]
    assert [facts[side].get("max_num_batched_tokens") for side in facts] == [None, 4096]


def test_the_load_is_that_of_the_options() -> None:
    words = [
        "--request-rate",
        "2.5",
        "--goodput",
        "ttft:500",
        "--goodput",
        "e2el:9000",
        "--input-len",
        "5",
        "--seed",
        "3",
    ]
    load = " ".join(serving.prepare(options.serve_options([POCKET, *words])).load)
    assert "--seed 3 --warm-up 1 --requests 2560 --model model --rate 2.5 --workload expertflow" in load
    assert "--prompt-tokens 5..5 --vocabulary 1000 --slo ttft:p99<500.000ms --slo e2e:p99<9000.000ms" in load


class Interrupted:
    """An engine whose user presses Ctrl-C in the second batch."""

    name, facts = OURS, {"version": "1"}
    limits = Limits(max_num_seqs=64, max_model_len=1024, kv_tokens=1 << 20)
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    """An engine of which one sample is there."""
    engine = Interrupted()
    sample = latency.Sample(
        side=OURS, batch=1, number=0, prefill_s=1.0, whole_s=2.0, decode_ms=8.0, prefill_tokens_s=1.0,
        output_tokens_s=1.0, output_tokens=2, step_ms=[], preemptions=0,
    )  # fmt: skip
    monkeypatch.setattr(Prepared, "ours", lambda _: engine)
    monkeypatch.setattr(latency, "measure", lambda *_: iter([sample]))
    return engine


@pytest.mark.parametrize("where", ["--json", "--picture"])
def test_a_full_disk_costs_no_figures(
    where: str, run: Run, measured: Interrupted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "found.svg"
    file.write_text("those of yesterday")

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as begun:
            begun.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    found = run(2, "bench", "latency", POCKET, "--batch-size", "1", where, str(file))
    assert measured.closed
    assert "batch 1: decode step" in found.out
    assert f"Cannot write {file}: No space left on device. Its figures are those that were printed." in found.err
    assert file.read_text() == "those of yesterday"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_in_a_folder_that_may_not_be_written_to(
    run: Run, measured: Interrupted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    file.write_text("those of yesterday")
    monkeypatch.setattr(os, "access", lambda *_: False)
    run(0, "bench", "latency", POCKET, "--batch-size", "1", "--output-json", str(file))
    assert measured.closed
    assert json.loads(file.read_text())["samples"]


def test_a_ctrl_c_that_an_import_swallows_is_heard_after_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def imported(name: str) -> Any:
        if name == "services.bench.ours":
            with suppress(KeyboardInterrupt):  # as torch does while it imports numpy
                os.kill(os.getpid(), signal.SIGINT)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.setattr(Prepared, "ours", lambda _: pytest.fail("it goes on"))
    found = run(130, "bench", "latency", POCKET)
    assert "ended before anything was measured" in found.err


@pytest.mark.parametrize(("after", "code"), [(3, 130), (0, 130)])
def test_ctrl_c_keeps_what_was_measured(
    after: int, code: int, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Interrupted()
    sample = latency.Sample(
        side=OURS, batch=1, number=0, prefill_s=1.0, whole_s=2.0, decode_ms=8.0, prefill_tokens_s=1.0,
        output_tokens_s=1.0, output_tokens=2, step_ms=[], preemptions=0,
    )  # fmt: skip

    def measure(*_: Any) -> Iterator[latency.Sample]:
        for _number in range(after):
            yield sample
        raise KeyboardInterrupt

    def start(_prepared: Prepared) -> OurEngine:
        return engine  # type: ignore[return-value]

    monkeypatch.setattr(Prepared, "ours", start)
    monkeypatch.setattr(latency, "measure", measure)
    file = tmp_path / "found.json"
    found = run(code, "bench", "latency", POCKET, "--json", str(file))
    assert engine.closed
    assert file.exists() == (after > 0)
    assert ("ended before anything was measured" in found.err) == (after == 0)
    if after:
        assert "CUT SHORT" in found.out
        content = json.loads(file.read_bytes())
        assert content["cut_short"]
        assert len(content["samples"]) == after
