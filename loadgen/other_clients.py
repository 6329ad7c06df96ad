"""Clients of others, as child processes that send a :class:`~loadgen.common_load.Load`: what each is called with, and
what its result file says. Facts are from the documentation of guidellm 0.8 and of `vllm bench serve` 0.25."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from loadgen.common_load import Arrivals, Figures, Load

PROGRESS_S = 10.0
LAST_LINES = 15
EVEN = 1e6
"""Burstiness at which the gaps of `vllm bench serve` deviate by a thousandth: one over its root."""


class OtherClientError(Exception):
    """Another client gave no figures."""


class ToolMissing(OtherClientError):
    """The command is not installed."""


class ToolFailed(OtherClientError):
    """The command ended with an error, or its result cannot be read."""


class OtherClient(Protocol):
    """A tool that sends a load. ``tool`` is the command that starts it, to be split as a shell does."""

    name: ClassVar[str]
    tool: ClassVar[str]
    install: ClassVar[str]

    def arguments(self, load: Load, result: Path) -> list[str]:
        """Returns what follows the command, so that it sends ``load`` and writes the file ``result``."""
        ...

    def read(self, result: Mapping[str, Any]) -> Figures:
        """Returns the figures of the result file's content; KeyError and TypeError where it has another form."""
        ...


class GuideLLM:
    """guidellm. What it calls inter-token latency is one mean for each request: TPOT here."""

    name: ClassVar[str] = "guidellm"
    tool: ClassVar[str] = "guidellm"
    install: ClassVar[str] = (
        "python3 -m venv ~/guidellm && ~/guidellm/bin/pip install guidellm, then --tool ~/guidellm/bin/guidellm"
    )

    def arguments(self, load: Load, result: Path) -> list[str]:
        profile = {"kind": "throughput", "max_concurrency": load.requests}
        if load.rate is not None:
            profile = {"kind": str(load.arrivals), "rate": load.rate}
        options = {
            "backend": {
                "kind": "openai_http",
                "target": load.url,
                "model": load.model,
                "request_format": "/v1/completions",
                "extras": {"body": {"temperature": 0, "ignore_eos": True}},
            },
            "profile": profile,
            "constraint": {"kind": "max_requests", "count": load.requests},
            "tokenizer": {"kind": "huggingface_auto", "model": load.tokenizer},
            "data": {
                "kind": "synthetic_text",
                "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens,
            },
            "seed": {"kind": "static", "value": load.seed},
            "metrics": {"kind": "generative", "sample_size": 0},
            "output": {"kind": "json", "path": str(result)},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
        return ["run", *words, "--disable-console-interactive"]

    def read(self, result: Mapping[str, Any]) -> Figures:
        [benchmark] = result["benchmarks"]
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]

        def latency(name: str, percentile: str) -> float:
            return float(metrics[name]["successful"]["percentiles"][percentile])

        return Figures(
            completed=totals["successful"],
            failed=totals["errored"] + totals["incomplete"],
            requests_s=metrics["requests_per_second"]["successful"]["mean"],
            output_tokens_s=metrics["output_tokens_per_second"]["successful"]["mean"],
            ttft_p50_ms=latency("time_to_first_token_ms", "p50"),
            ttft_p99_ms=latency("time_to_first_token_ms", "p99"),
            tpot_p50_ms=latency("inter_token_latency_ms", "p50"),
            tpot_p99_ms=latency("inter_token_latency_ms", "p99"),
        )


class VllmBench:
    """`vllm bench serve`, with its random prompts."""

    name: ClassVar[str] = "vllm"
    tool: ClassVar[str] = "vllm"
    install: ClassVar[str] = "pip install vllm==0.25.1, on a machine with a GPU"

    def arguments(self, load: Load, result: Path) -> list[str]:
        rate = "inf" if load.rate is None else str(load.rate)
        burstiness = EVEN if load.arrivals is Arrivals.CONSTANT else 1.0
        options = {
            "backend": "openai",
            "base-url": load.url,
            "endpoint": "/v1/completions",
            "model": load.model,
            "tokenizer": load.tokenizer,
            "dataset-name": "random",
            "random-input-len": load.prompt_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            "request-rate": rate,
            "burstiness": burstiness,
            "temperature": 0,
            "seed": load.seed,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": "50,99",
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return ["bench", "serve", *words, "--ignore-eos", "--save-result", "--disable-tqdm"]

    def read(self, result: Mapping[str, Any]) -> Figures:
        latencies: dict[str, Any] = {
            f"{name}_p{percent}_ms": float(result[f"p{percent}_{name}_ms"])
            for name in ("ttft", "tpot", "itl")
            for percent in (50, 99)
        }
        return Figures(
            completed=result["completed"],
            failed=result["failed"],
            requests_s=result["request_throughput"],
            output_tokens_s=result["output_throughput"],
            **latencies,
        )


CLIENTS: Mapping[str, OtherClient] = {client.name: client for client in (GuideLLM(), VllmBench())}


def command(client: OtherClient, tool: str | None) -> list[str]:
    """Returns the words that start ``client``: those of ``tool`` if it is given.

    Raises:
        ToolMissing: no such program; the message says how to install it.
    """
    words = shlex.split(tool or client.tool)
    if not words or shutil.which(words[0]) is None:
        raise ToolMissing(f"{tool or client.tool} is not installed. Install it: {client.install}")
    return words


def send(
    client: OtherClient,
    words: list[str],
    load: Load,
    folder: Path,
    on_progress: Callable[[float], None] = lambda _seconds: None,
) -> Figures:
    """Let ``client``, which ``words`` start, send ``load``. Its result and its output go into ``folder``;
    ``on_progress`` gets the seconds since its start from time to time.

    Raises:
        ToolFailed: it gave no figures; the message has the last lines of its output.
    """
    result, log = folder / "result.json", folder / "output.txt"
    folder.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen([*words, *client.arguments(load, result.resolve())], stdout=output, stderr=output)
        try:
            _wait(process, on_progress)
        finally:
            process.terminate()
            process.wait()
    if process.returncode != 0 or not result.exists():
        raise ToolFailed(f"{client.name} ended with {process.returncode}:\n{_last(log)}")
    try:
        figures = client.read(json.loads(result.read_bytes()))
    except (KeyError, TypeError, ValueError) as error:
        name = f"{type(error).__name__} {error}"
        raise ToolFailed(f"{result} has another form than {client.name}'s documentation says: {name}") from error
    if not figures.completed:
        raise ToolFailed(f"{client.name} got no answer: all of its requests failed.\n{_last(log)}")
    return figures


def _wait(process: subprocess.Popen[bytes], on_progress: Callable[[float], None]) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(PROGRESS_S)
            return
        except subprocess.TimeoutExpired:
            on_progress(time.monotonic() - began)


def _last(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
