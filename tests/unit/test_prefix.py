"""Names of prefixes: equal for the same tokens among those that share, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefix import prefix_chain, prefix_root

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ROOT = prefix_root("all", "", "")


def chain(token_ids: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    return list(prefix_chain(token_ids, block_size, root))


@given(st.text(alphabet="ab\0é", max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_roots_are_equal_where_tenant_and_salt_are(text: str, cut: int, other: int) -> None:
    one, two = (text[:cut], text[cut:]), (text[:other], text[other:])
    assert (prefix_root("tenant", *one) == prefix_root("tenant", *two)) == (one == two)
    assert (prefix_root("all", *one) == prefix_root("all", *two)) == (one[1] == two[1])


@given(IDS, IDS, st.integers(1, 5))
def test_names_are_equal_as_far_as_the_blocks_are(one: list[int], other: list[int], block_size: int) -> None:
    same = [end for end in range(block_size, min(len(one), len(other)) + 1, block_size) if one[:end] == other[:end]]
    first, second = chain(one, block_size), chain(other, block_size)
    assert len(first) == len(one) // block_size
    assert sum(a == b for a, b in zip(first, second, strict=False)) == len(same)
    assert len(set(first) | set(second)) == len(first) + len(second) - len(same)


@given(IDS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_goes_on_where_it_stopped(token_ids: list[int], block_size: int, blocks: int) -> None:
    whole = chain(token_ids, block_size)
    head = chain(token_ids[: blocks * block_size], block_size)
    rest = chain(token_ids[len(head) * block_size :], block_size, head[-1] if head else ROOT)
    assert head + rest == whole


def test_ids_that_no_model_knows_have_names_too() -> None:
    assert len({*chain([2**31] * 4), *chain([2**63] * 4), *chain([1] * 4)}) == 3
