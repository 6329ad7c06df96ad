"""Every kernel on a GPU against its reference: ``python -m bench.verify``."""

from __future__ import annotations

import pytest

from bench import verify

pytestmark = pytest.mark.gpu1


def test_each_is_within_its_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    failed = verify.main([])
    assert not failed, capsys.readouterr().out
