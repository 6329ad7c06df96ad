"""Tests of tests: a copy of ``moe_kernels`` with one line broken must turn a named test red.

A :class:`Runner` is a process that has torch, triton and pytest imported and ``moe_kernels`` not. For each request it
forks, puts the copy first on the path and runs the test: no mutation pays for the imports, none sees another's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kernels/moe_kernels"
TIMEOUT_S = 240
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
"""A broken index may leave the tensor: the interpreter checks no bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """``old``, found once in ``file`` of moe_kernels, becomes ``new``; ``test`` (a pytest node id) must then fail.
    ``strays``: what it stores leaves the tensor; that crashes, see :func:`_guard`, where chance would decide."""

    file: str
    old: str
    new: str
    test: str
    strays: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """``red``: an assertion failed or the process crashed. ``broken``: anything else but a pass, such as an import."""

    verdict: Literal["green", "red", "broken"]
    detail: str


def load(path: Path) -> list[Mutation]:
    return [Mutation(**table) for table in tomllib.loads(path.read_text()).get("mutation", [])]


def mutated_copy(mutation: Mutation, directory: Path) -> Path:
    """A directory for ``sys.path`` that holds the broken package.

    Raises:
        AssertionError: ``old`` is not in the file, or more than once.
    """
    path = plain_copy(directory) / "moe_kernels" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has {text.count(mutation.old)} times: {mutation.old!r}"
    path.write_text(text.replace(mutation.old, mutation.new))
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
        stale.unlink()
    return directory


def plain_copy(directory: Path) -> Path:
    """With the bytecode: its files keep their times, so it stays valid but for a file that is rewritten."""
    shutil.copytree(PACKAGE, directory / "moe_kernels")
    return directory


class Runner:
    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment |= {"TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testkit.models.mutations"],
            env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, tests: list[str], package_directory: Path, *, guard: bool = False) -> Result:
        """Up to the first failure. ``guard``: new tensors end where memory does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([tests, str(package_directory), guard]), file=self._process.stdin, flush=True)
        return Result(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


class _Watch:
    """A pytest plugin that distinguishes assertions from every other failure."""

    def __init__(self) -> None:
        self.passed = 0
        self.verdict = "green"
        self.detail = ""

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        in_test = getattr(report, "when", "collect") == "call"
        self.verdict = "red" if in_test and _asserts(call.excinfo.value) else "broken"
        self.detail = str(report.longrepr)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed

    def result(self, code: int, tests: int) -> dict[str, str]:
        if self.verdict == "green" and (code or self.passed < tests):
            return {"verdict": "broken", "detail": f"pytest ended with {code} and {self.passed} passed tests"}
        return {"verdict": self.verdict, "detail": self.detail}


def _asserts(error: BaseException) -> bool:
    """``pytest.raises`` that saw nothing counts; so do the several failures of one hypothesis test."""
    import pytest

    if isinstance(error, BaseExceptionGroup):
        return all(_asserts(part) for part in error.exceptions)
    return isinstance(error, (AssertionError, pytest.fail.Exception))


def _serve() -> None:
    import hypothesis
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import triton  # noqa: F401

    # The first failure is the answer: no search for a smaller one, no note of it for later runs.
    hypothesis.settings.register_profile(
        "mutations", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), database=None, deadline=None
    )
    hypothesis.settings.load_profile("mutations")
    for line in sys.stdin:
        print(json.dumps(_forked(*json.loads(line))), flush=True)


def _forked(tests: list[str], package_directory: str, guard: bool) -> dict[str, str]:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        signal.alarm(TIMEOUT_S)
        if guard:
            _guard()
        _report(tests, package_directory, theirs)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        result: dict[str, str] = json.loads(answer)
        return result
    died = os.waitstatus_to_exitcode(status)
    return {"verdict": "red" if -died in CRASHES else "broken", "detail": f"the test's process ended with {died}"}


def _guard() -> None:
    """What is allocated from now on ends where nobody may write: a store behind it ends the process."""
    import torch

    from testkit.models.guarded import guarded

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    torch.empty = lambda *size, **how: guarded(empty(*size, **how))
    torch.Tensor.new_empty = lambda self, *size, **how: guarded(new_empty(self, *size, **how))


def _report(tests: list[str], package_directory: str, pipe: int) -> None:
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path.insert(0, package_directory)
    watch = _Watch()
    plugins = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    code = pytest.main(["-q", "-x", *plugins, *tests], plugins=[watch])
    result = watch.result(int(code), len(tests))
    found = getattr(sys.modules.get("moe_kernels"), "__file__", None) or ""
    if result["verdict"] != "broken" and not found.startswith(package_directory):
        result = {"verdict": "broken", "detail": f"the test ran {found or 'without moe_kernels'}"}
    with os.fdopen(pipe, "w") as file:
        json.dump(result, file)
    os._exit(0)


if __name__ == "__main__":
    _serve()
