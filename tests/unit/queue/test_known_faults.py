"""Which versions of Redis are warned about."""

from __future__ import annotations

from typing import Any

import pytest

from services.queue.connect import known_faults


def _info(version: str, **more: Any) -> dict[str, Any]:
    return {"redis_version": version, "tcp_port": 6379, **more}


@pytest.mark.parametrize("version", ["6.2.23", "7.2.15", "7.4.10", "7.4.11", "8.8.1", "8.9.0", "9.0.0", "255.255.255"])
def test_a_mended_version_is_fine(version: str) -> None:
    assert known_faults(_info(version)) == ""


@pytest.mark.parametrize(
    ("version", "cure"),
    [
        ("6.2.14", "6.2.23"),
        ("7.4.6", "7.4.10"),
        ("7.4.9", "7.4.10"),
        ("8.2.7", "8.2.8"),
        ("8.8.0", "8.8.1"),
        ("7.0.15", "a release line that is still maintained"),
        ("8.0.6", "a release line that is still maintained"),
    ],
)
def test_an_older_one_is_named_with_its_cure(version: str, cure: str) -> None:
    said = known_faults(_info(version))
    assert said.startswith(f"Redis {version} has known vulnerabilities")
    assert f"Upgrade to {cure}, unless" in said


def test_one_that_nobody_else_reaches_and_one_of_another_make_are_not() -> None:
    assert known_faults(_info("6.2.14") | {"tcp_port": 0}) == ""
    assert known_faults(_info("7.2.4", valkey_version="8.1.9")) == ""
