"""Each line of mutations.toml breaks one line of a kernel, and the test that it names sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.models.mutations import Mutation, Runner, load, mutated_copy, plain_copy

MUTATIONS = load(Path(__file__).with_name("mutations.toml"))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


def test_whole_package_passes(runner: Runner, tmp_path: Path) -> None:
    """One test of it: that each of them is green unbroken is seen where it runs itself."""
    result = runner.run([MUTATIONS[0].test], plain_copy(tmp_path))
    assert result.verdict == "green", result.detail


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.new}")
def test_broken_line_is_seen(mutation: Mutation, runner: Runner, tmp_path: Path) -> None:
    result = runner.run([mutation.test], mutated_copy(mutation, tmp_path), guard=mutation.strays)
    assert result.verdict == "red", f"{result.verdict}: {result.detail}"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("return 2", "green"),
        ("return 3", "red"),
        ("raise KeyError", "broken"),
        ("return (", "broken"),
        ("import os; os.kill(os.getpid(), 11)", "red"),
        ("import os; os.kill(os.getpid(), 9)", "broken"),
    ],
)
def test_only_assertions_and_crashes_count(body: str, verdict: str, runner: Runner, tmp_path: Path) -> None:
    """The runner itself, on a package of one function: right, wrong, other exception, syntax error, crash, kill."""
    (tmp_path / "moe_kernels").mkdir()
    (tmp_path / "moe_kernels/__init__.py").write_text(f"def two():\n    {body}\n")
    test = tmp_path / "test_two.py"
    test.write_text("import moe_kernels\ndef test_two():\n    assert moe_kernels.two() == 2\n")
    assert runner.run([str(test)], tmp_path).verdict == verdict


def test_a_test_that_does_not_exist_is_no_proof(runner: Runner, tmp_path: Path) -> None:
    assert runner.run(["tests/kernels/test_route.py::test_nothing"], plain_copy(tmp_path)).verdict == "broken"


def test_text_must_be_found_once(tmp_path: Path) -> None:
    for at, old in enumerate(("no such text", "import")):
        with pytest.raises(AssertionError, match="times"):
            mutated_copy(Mutation(file="experts/op.py", old=old, new="", test=""), tmp_path / str(at))
