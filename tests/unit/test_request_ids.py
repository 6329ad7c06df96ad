"""The ids of a request: what is left of what a client gave, and how one is found from another."""

from __future__ import annotations

import re

import pytest

from services.request_ids import MAX_REQUEST_ID, RequestIds, about, request_id_of, sequence_id


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("slow-1", "slow-1"),
        ("a.b:c_D-9.", "a.b:c_D-9."),
        ("a b=c\n\x1b[31m{}\u202e'\"", "abc31m"),
        ("y" * 300, "y" * MAX_REQUEST_ID),
    ],
)
def test_each_id_begins_with_the_one_before_it_and_leads_back(given: str, kept: str) -> None:
    ids = RequestIds.of(given)
    assert ids.request_id == kept
    assert re.fullmatch(re.escape(kept) + r"\.[0-9a-f]{32}", ids.base)
    assert RequestIds.of(given).base != ids.base, "clients may use an id again"
    assert request_id_of(sequence_id(ids.base, 17)) == kept


@pytest.mark.parametrize("given", ["", "\x00 =é"])
def test_an_id_that_is_made_is_the_base(given: str) -> None:
    ids = RequestIds.of(given)
    assert re.fullmatch("[0-9a-f]{32}", ids.base)
    assert ids.request_id == ids.base == request_id_of(sequence_id(ids.base, 0))


def test_a_line_has_both_names_and_the_attempt() -> None:
    assert about("slow-1.ab-0", 2) == {"request_id": "slow-1", "sequence": "slow-1.ab-0", "attempt": 2}
    assert about("ab-3") == {"request_id": "ab", "sequence": "ab-3"}
    assert about("ab-3", tenant="alice") == {"request_id": "ab", "sequence": "ab-3", "tenant": "alice"}
