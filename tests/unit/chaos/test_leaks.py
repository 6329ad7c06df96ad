"""What counts as a leak."""

from __future__ import annotations

import pytest
from chaos.leaks import Amounts, Series

REST: Amounts = {"memory": 100.0, "descriptors": 20.0, "threads": 5.0}


def series(memory: list[float], after: Amounts) -> Series:
    samples = [{"memory": each, "descriptors": 60.0, "threads": 9.0} for each in memory]
    return Series(before=dict(REST), after=REST | after, samples=samples)


@pytest.mark.parametrize(
    ("memory", "after", "found"),
    [
        ([100.0 + 30 * (at < 10) for at in range(40)], {}, []),
        ([100.0] * 5 + [180.0] * 35, {"memory": 180.0, "descriptors": 28.0}, []),  # a first peak that stays
        ([100.0 + at for at in range(40)], {}, ["memory grew from 114.5 to 134.5 MiB"]),
        ([100.0] * 40, {"descriptors": 29.0}, ["29 descriptors stayed of 20 before"]),
        ([100.0] * 40, {"threads": 7.0}, ["7 threads stayed of 5 before"]),
    ],
    ids=["warms up", "takes more once", "grows", "keeps descriptors", "keeps threads"],
)
def test_what_grows_or_stays_is_named(memory: list[float], after: Amounts, found: list[str]) -> None:
    assert series(memory, after).growth() == found


def test_keys_that_stay_in_redis_are_named() -> None:
    redis = Series(before={"memory": 1.0, "keys": 10}, after={"memory": 1.0, "keys": 30}, samples=[{"memory": 1.0}] * 8)
    assert redis.growth() == ["30 keys stayed of 10 before"]
