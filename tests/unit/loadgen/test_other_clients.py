"""Clients of others: what they are called with, what their results say, and what is said where they fail."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.common_load import Arrivals, Figures, Load
from loadgen.other_clients import CLIENTS, GuideLLM, ToolFailed, ToolMissing, VllmBench, command, send

LOAD = Load(
    url="http://h:1", model="m", tokenizer="/t", rate=4.0, requests=30, prompt_tokens=64, output_tokens=32, seed=7
)
CONSTANT, AT_ONCE = replace(LOAD, arrivals=Arrivals.CONSTANT), replace(LOAD, rate=None)
RESULT = Path("/out/result.json")
WANTED = Figures(
    completed=28,
    failed=2,
    requests_s=3.5,
    output_tokens_s=112.0,
    ttft_p50_ms=20.0,
    ttft_p99_ms=40.0,
    tpot_p50_ms=5.0,
    tpot_p99_ms=6.0,
)


def options_of(words: list[str]) -> dict[str, str]:
    """Options with a value, by their names."""
    return {name: value for name, value in itertools.pairwise(words) if name.startswith("--") and value[:2] != "--"}


def guidellm_options(load: Load) -> dict[str, Any]:
    words = GuideLLM().arguments(load, RESULT)
    assert words[0] == "run"
    return {name: json.loads(value) for name, value in options_of(words).items()}


def test_guidellm_gets_the_load() -> None:
    options = guidellm_options(LOAD)
    backend = options["--backend"]
    assert (backend["kind"], backend["target"], backend["model"]) == ("openai_http", "http://h:1", "m")
    assert backend["request_format"] == "/v1/completions"
    assert backend["extras"]["body"] == {"temperature": 0, "ignore_eos": True}
    assert options["--data"] == {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 32}
    assert options["--constraint"] == {"kind": "max_requests", "count": 30}
    assert options["--tokenizer"]["model"] == "/t"
    assert options["--seed"]["value"] == 7
    assert options["--output"] == {"kind": "json", "path": str(RESULT)}


@pytest.mark.parametrize(
    ("load", "profile"),
    [
        (LOAD, {"kind": "poisson", "rate": 4.0}),
        (CONSTANT, {"kind": "constant", "rate": 4.0}),
        (AT_ONCE, {"kind": "throughput", "max_concurrency": 30}),
    ],
)
def test_guidellm_gets_the_arrivals(load: Load, profile: dict[str, Any]) -> None:
    assert guidellm_options(load)["--profile"] == profile


def test_vllm_bench_gets_the_load() -> None:
    words = VllmBench().arguments(LOAD, RESULT)
    assert words[:2] == ["bench", "serve"]
    assert {"--ignore-eos", "--save-result"} <= set(words)
    options = options_of(words)
    assert options["--base-url"] + options["--endpoint"] == "http://h:1/v1/completions"
    assert (options["--dataset-name"], options["--model"], options["--tokenizer"]) == ("random", "m", "/t")
    assert (options["--random-input-len"], options["--random-output-len"]) == ("64", "32")
    assert options["--num-prompts"] == "30"
    assert (options["--temperature"], options["--seed"]) == ("0", "7")
    assert Path(options["--result-dir"], options["--result-filename"]) == RESULT


@pytest.mark.parametrize(
    ("load", "rate", "burstiness"), [(LOAD, "4.0", "1.0"), (CONSTANT, "4.0", "1000000.0"), (AT_ONCE, "inf", "1.0")]
)
def test_vllm_bench_gets_the_arrivals(load: Load, rate: str, burstiness: str) -> None:
    options = options_of(VllmBench().arguments(load, RESULT))
    assert (options["--request-rate"], options["--burstiness"]) == (rate, burstiness)


def of_guidellm() -> dict[str, Any]:
    """What guidellm 0.8.1 writes, without what is not read."""

    def metric(mean: float, p50: float, p99: float) -> dict[str, Any]:
        return {"successful": {"mean": mean, "percentiles": {"p50": p50, "p99": p99}}, "total": {"mean": -1.0}}

    metrics = {
        "request_totals": {"successful": 28, "errored": 1, "incomplete": 1, "total": 30},
        "requests_per_second": metric(3.5, 0, 0),
        "output_tokens_per_second": metric(112.0, 0, 0),
        "time_to_first_token_ms": metric(0, 20.0, 40.0),
        "inter_token_latency_ms": metric(0, 5.0, 6.0),
        "time_per_output_token_ms": metric(0, 7.0, 8.0),
    }
    return {"metadata": {"version": 2}, "benchmarks": [{"metrics": metrics}]}


def of_vllm() -> dict[str, Any]:
    """What `vllm bench serve` writes, without what is not read."""
    latencies = {"p50_ttft_ms": 20.0, "p99_ttft_ms": 40.0, "p50_tpot_ms": 5.0, "p99_tpot_ms": 6.0}
    latencies |= {"p50_itl_ms": 4.5, "p99_itl_ms": 9.0}
    return {"completed": 28, "failed": 2, "request_throughput": 3.5, "output_throughput": 112.0, **latencies}


def test_results_are_read() -> None:
    assert GuideLLM().read(of_guidellm()) == WANTED
    assert VllmBench().read(of_vllm()) == replace(WANTED, itl_p50_ms=4.5, itl_p99_ms=9.0)


def test_a_file_that_guidellm_wrote_is_read() -> None:
    """Of 60 requests of 64 tokens at 4 a second, on a busy machine; distributions are cut to what counts."""
    figures = GuideLLM().read(json.loads((Path(__file__).parent / "guidellm_result.json").read_bytes()))
    assert (figures.completed, figures.failed) == (60, 0)
    assert figures.output_tokens_s == pytest.approx(64 * figures.requests_s)
    assert figures.ttft_p50_ms == pytest.approx(641.75, abs=0.01)
    assert figures.tpot_p99_ms == pytest.approx(266.18, abs=0.01)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_tool_that_is_missing_is_named_with_the_way_to_install_it(name: str) -> None:
    with pytest.raises(ToolMissing, match=r"^/none/such --x is not installed\. Install it: .*pip install"):
        command(CLIENTS[name], "/none/such --x")
    assert command(CLIENTS[name], f"{sys.executable} -m 'a b'") == [sys.executable, "-m", "a b"]


STUB = """
import json, sys
from pathlib import Path
words = sys.argv[1:]
print("asked for", words[words.index("--random-output-len") + 1])
Path(words[words.index("--result-dir") + 1], words[words.index("--result-filename") + 1]).write_text({text!r})
sys.exit({code})
"""


def sent(folder: Path, text: str, code: int = 0) -> Figures:
    """What a tool gives that writes ``text`` and ends with ``code``."""
    stub = folder / "stub.py"
    stub.write_text(STUB.format(text=text, code=code))
    return send(VllmBench(), [sys.executable, str(stub)], LOAD, folder / "out")


def test_a_tool_is_run_and_its_result_read(tmp_path: Path) -> None:
    assert sent(tmp_path, json.dumps(of_vllm())).requests_s == 3.5
    assert (tmp_path / "out/output.txt").read_text() == "asked for 32\n"


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="vllm ended with 3:\nasked for 32"):
        sent(tmp_path, json.dumps(of_vllm()), code=3)


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_result_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ToolFailed, match=r"result\.json has another form"):
        sent(tmp_path, text)


def test_figures_without_any_answer_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="all of its requests failed"):
        sent(tmp_path, json.dumps(of_vllm() | {"completed": 0, "failed": 30}))


def test_no_result_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    sent(tmp_path, json.dumps(of_vllm()))
    with pytest.raises(ToolFailed, match="ended with 0"):
        send(VllmBench(), [sys.executable, "-c", ""], LOAD, tmp_path / "out")
