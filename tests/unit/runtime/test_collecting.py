"""The collector of cycles rests while anybody asks for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.runtime.collecting import no_collection


class Knot:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_until_the_last_one_is_done() -> None:
    with no_collection():
        with no_collection():
            pass
        knot = weakref.ref(Knot())
        made: list[list[int]] = [[] for _ in range(3 * gc.get_threshold()[0])]
        assert knot() is not None, len(made)
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_as_it_was_after_an_error_and_where_it_was_off() -> None:
    with pytest.raises(KeyError), no_collection():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()
