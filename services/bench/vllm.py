"""vLLM beside this project: found in a Python, run as an engine in a process of its own, or started as a server.

What is known of it is that of vLLM 0.25: ``vllm.LLM``, ``SamplingParams``, and ``vllm serve``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.bench.sides import VLLM, Batch, Timed
from services.errors import BenchFailed, VllmMissing
from services.runtime import die_with_parent

START_S = 900.0
"""Of its server: it compiles, and captures graphs."""
_END_S = 15.0
_DRIVER = Path(__file__).with_name("vllm_driver.py")
_LOOK = (
    "import importlib.util as u, importlib.metadata as m\n"
    "if u.find_spec('vllm') is None: raise SystemExit(3)\n"
    "try: print(m.version('vllm'))\n"
    "except m.PackageNotFoundError: print('unknown')"
)
_LOOK_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """An interpreter that has it. ``options``: more words of ``vllm serve``, which are arguments of its engine."""

    python: str
    version: str
    options: Sequence[str] = ()

    def engine_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of vllm.LLM: ``arguments``, and above them the options."""
        return {**arguments, **engine_arguments(self.options)}

    def serve(self, model: str, name: str, port: int, more: Sequence[str] = ()) -> list[str]:
        """Returns the command of its server."""
        command = [self.python, "-m", "vllm.entrypoints.cli.main"]
        return server_command(command, model, name, port, [*more, *self.options])


def server_command(command: Sequence[str], model: str, name: str, port: int, options: Sequence[str]) -> list[str]:
    """Returns the command that serves ``model`` under ``name``; ``command`` starts vLLM."""
    return [*command, "serve", model, "--served-model-name", name, "--port", str(port), *options]


def find(python: str | None, options: str = "") -> Vllm:
    """Returns vLLM as installed for the interpreter ``python``, by default this one.

    Raises:
        VllmMissing: there is none.
    """
    asked = python or sys.executable
    try:
        found = subprocess.run([asked, "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VllmMissing(asked, getattr(error, "strerror", None) or "it does not answer") from error
    if found.returncode:
        last = found.stderr.strip().splitlines()[-1:]
        raise VllmMissing(asked, "it has no package vllm" if found.returncode == 3 else "".join(last) or "it fails")
    return Vllm(python=asked, version=found.stdout.strip(), options=shlex.split(options))


def engine_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Returns options of the command line as arguments of vllm.LLM.

    >>> engine_arguments(["--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching", "--dtype=half"])
    {'max_num_seqs': 8, 'enforce_eager': True, 'enable_prefix_caching': False, 'dtype': 'half'}
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            negated = name.startswith("no_")
            name = name.removeprefix("no_")
            found[name] = _value(value) if equals else not negated
        elif name:
            found[name] = _value(word)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(slots=True)
class VllmEngine:
    """The engine of another process, which :func:`start` returns."""

    process: subprocess.Popen[str]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return VLLM

    def run(self, batch: Batch, on_finished: Callable[[int], None]) -> Timed:
        answer = _asked(self.process, {"prompts": [list(each) for each in batch.prompts], "answers": batch.answers})
        on_finished(len(batch.prompts))
        return Timed(seconds=answer["seconds"], tokens=answer["tokens"])

    def close(self) -> None:
        _close(self.process)


def start(vllm: Vllm, arguments: Mapping[str, Any]) -> VllmEngine:
    """Returns the engine once it is loaded, which takes minutes on a GPU. What it prints goes to stderr.

    Raises:
        BenchFailed: it ended.
    """
    options = vllm.engine_arguments(arguments)
    process = subprocess.Popen(
        [vllm.python, str(_DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not its own
        preexec_fn=die_with_parent(),
    )
    try:
        return VllmEngine(process, {**options, **_asked(process, options)})
    except BaseException:
        _close(process)
        raise


def _asked(process: subprocess.Popen[str], content: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(content) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    except KeyboardInterrupt:  # it would go on with what nobody waits for
        os.killpg(process.pid, signal.SIGTERM)
        raise
    if not line:
        raise BenchFailed(f"vLLM ended with {process.wait()}.", hint="Its output above says why.")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _close(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
