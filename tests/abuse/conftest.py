"""One deployment after the other, the book of all attacks, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from abuse.kit.stage import Stages, well
from abuse.table import Book, as_json

_BOOK = pytest.StashKey[Book]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BOOK] = Book()


@pytest.fixture(scope="session")
def book(request: pytest.FixtureRequest) -> Book:
    return request.config.stash[_BOOK]


@pytest.fixture(scope="session")
def stages() -> Iterator[Stages]:
    found = Stages(well)
    yield found
    found.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    book = config.stash[_BOOK]
    if not book.records:
        return
    terminalreporter.section("attacks")
    for line in book.lines():
        terminalreporter.write_line(line)
    if out := os.environ.get("ABUSE_OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        Path(out, "abuse.json").write_text(as_json(book.all()))
        Path(out, "brief.json").write_text(as_json(book.brief()))
