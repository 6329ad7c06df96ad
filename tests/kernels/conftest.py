"""Tests that ask for ``path`` or ``regime``, as an argument or by ``usefixtures``, run once per way through an op.

``path``: plain torch, interpreted kernel. ``regime``: fused_moe's reference and each of its kernels; a test that also
asks for ``rows`` gets numbers of rows that suit the regime. All tests here run with poisoned memory: what
``torch.empty`` returns is NaN, or the largest integer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from testkit.models.regimes import REGIMES, REGIMES_AND_ROWS, regime

from moe_kernels import backend

assert backend.INTERPRETED, "tests/conftest.py sets TRITON_INTERPRET=1; run pytest from the root of the repository"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)}
    wanted = {"path", "regime", "rows"} & set(metafunc.fixturenames) - named
    if "path" in wanted:
        metafunc.parametrize("path", ["torch", "triton"])
    if {"regime", "rows"} <= wanted:
        metafunc.parametrize(("regime", "rows"), REGIMES_AND_ROWS)
    elif "regime" in wanted:
        metafunc.parametrize("regime", REGIMES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Around the call alone: fixtures build their inputs before the path is chosen. Works with hypothesis."""
    chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    with ExitStack() as stack:
        if "path" in chosen:
            stack.enter_context(backend.forced(chosen["path"]))
        if "regime" in chosen:
            stack.enter_context(regime(chosen["regime"]))
        stack.enter_context(_poisoned_memory())
        return (yield)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills uninitialised memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
