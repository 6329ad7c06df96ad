"""What a worker says it can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.attention.setup.capacity import capacity, credit
from services.errors import ConfigError


@pytest.mark.parametrize(
    ("kv_blocks", "asked", "length"),
    [(20, None, 320), (20, 300, 300), (32, None, 512)],
    ids=["the model's own is lowered", "what was asked for fits", "the model's own fits"],
)
def test_the_length_is_what_the_blocks_hold(kv_blocks: int, asked: int | None, length: int) -> None:
    room = capacity(kv_blocks=kv_blocks, block_size=16, block_bytes=1 << 20, asked=asked, max_position=512)
    assert (room.kv_tokens, room.max_model_len, room.lowered) == (16 * kv_blocks, length, length == 320)


def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory-gib 0.026, or lower --max-model-len to at most 320"):
        capacity(kv_blocks=20, block_size=16, block_bytes=1 << 20, asked=401, max_position=512)
    with pytest.raises(ConfigError, match="512 positions"):
        capacity(kv_blocks=2000, block_size=16, block_bytes=1 << 20, asked=513, max_position=512)


@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_a_worker_always_gives_some_credit_and_more_places_than_its_batch(kv_tokens: int, seqs: int) -> None:
    tokens, requests = credit(kv_tokens=kv_tokens, max_num_seqs=seqs)
    assert tokens >= 1
    assert seqs < requests <= seqs + max(1, seqs // 8)
