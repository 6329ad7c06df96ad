"""The routing table: every expert in one group, over the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.routing import RoutingTable, Seat, ShardGroup, decode_table, encode_table, even_groups


def table(groups: tuple[ShardGroup, ...], *seats: Seat) -> RoutingTable:
    return RoutingTable(epoch=7, fingerprint="f", num_experts=4, groups=groups, seats=seats)


@given(st.integers(1, 40), st.data())
def test_even_groups_hold_every_expert_once(experts: int, data: st.DataObject) -> None:
    groups = even_groups([0, 2], experts, data.draw(st.integers(1, experts)))
    made = RoutingTable(epoch=1, fingerprint="", num_experts=experts, groups=groups)
    sizes = [len(group.experts[2]) for group in groups]
    assert set(made.group_of) == {0, 2}
    assert max(sizes) - min(sizes) <= 1
    assert [made.group_of[0].count(group.number) for group in groups] == sizes


def test_a_table_comes_back_as_it_was() -> None:
    seat = Seat(number=3, worker="w", group=1, host="h", port=9, capacity=0.5)
    sent = table(even_groups([0], 4, 2), seat)
    back = decode_table(encode_table(sent))
    assert back == sent
    assert back.seats_of == {0: (), 1: (seat,)}


@pytest.mark.parametrize(
    ("experts", "said"), [(((0, 1, 2),), "expert 3 of layer 5 is in no"), (((0, 1), (1, 2, 3)), "in groups 0 and 1")]
)
def test_an_expert_without_a_group_or_with_two_is_named(experts: tuple[tuple[int, ...], ...], said: str) -> None:
    groups = tuple(ShardGroup(number=number, experts={5: ids}) for number, ids in enumerate(experts))
    with pytest.raises(ConfigError, match=said):
        table(groups).group_of  # noqa: B018


@pytest.mark.parametrize("groups", [0, 5])
def test_a_number_of_groups_that_cannot_be_is_refused(groups: int) -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        even_groups([0], 4, groups)
