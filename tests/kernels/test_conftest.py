"""What conftest.py promises to the other tests here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_kernels import backend


@given(number=st.just(1))
def test_path_is_in_force(path: str, number: int) -> None:
    assert number == 1
    assert backend.use_triton(torch.zeros(1)) == (path == "triton")


@pytest.mark.parametrize("path", ["triton"])
def test_a_test_may_name_its_path(path: str) -> None:
    assert path == "triton"
    assert backend.use_triton(torch.zeros(1))


def test_without_a_path_the_device_decides() -> None:
    assert not backend.use_triton(torch.zeros(1))


def test_uninitialised_memory_is_poisoned() -> None:
    for tensor in (torch.empty(3), torch.zeros(3).new_empty(3), torch.empty_like(torch.zeros(3, dtype=torch.float16))):
        assert tensor.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_paths_nest_and_unknown_ones_are_refused() -> None:
    with backend.forced("triton"):
        with backend.forced("torch"):
            assert not backend.use_triton(torch.zeros(1))
        assert backend.use_triton(torch.zeros(1))
    with pytest.raises(ValueError, match="cuda"), backend.forced("cuda"):  # type: ignore[arg-type]
        pass
