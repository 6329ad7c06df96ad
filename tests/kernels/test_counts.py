"""Counts of pairs by expert, by the reference and the interpreted kernel."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import ArgumentError, count_pairs

both_paths = pytest.mark.usefixtures("path")


@both_paths
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("experts", "rows", "slots"), [(1, 1, 1), (8, 3, 2), (60, 700, 4), (128, 300, 8)])
def test_pairs_are_added_to_what_was_there(experts: int, rows: int, slots: int, dtype: torch.dtype) -> None:
    """Ids that are no expert's, on both sides, count for none."""
    generator = torch.Generator().manual_seed(rows)
    ids_TK = torch.randint(-2, experts + 2, (rows, slots), generator=generator, dtype=dtype)
    counts_E = torch.arange(experts) + 2**40
    wanted = [2**40 + expert + int((ids_TK == expert).sum()) for expert in range(experts)]
    count_pairs(counts_E, ids_TK)
    assert counts_E.tolist() == wanted


@both_paths
def test_strided_ids_and_no_rows() -> None:
    counts_E = torch.zeros(4, dtype=torch.int64)
    count_pairs(counts_E, torch.tensor([[0, 1], [3, 3], [9, 1]]).T)
    count_pairs(counts_E, torch.empty(0, 2, dtype=torch.int64))
    assert counts_E.tolist() == [1, 2, 0, 2]
    count_pairs(none := torch.zeros(0, dtype=torch.int64), torch.tensor([[0, -1]]))
    assert none.tolist() == []


@pytest.mark.parametrize(
    ("counts", "ids", "says"),
    [
        (torch.zeros(2), torch.zeros(1, 1, dtype=torch.int64), "counts must be int64, found torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), "of one dimension"),
        (torch.zeros(4, dtype=torch.int64)[::2], torch.zeros(1, 1, dtype=torch.int64), "contiguous"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1), "ids must be int32 or int64, found torch.float32"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64, device="meta"), "ids are on meta"),
    ],
)
def test_what_does_not_fit_is_refused(counts: torch.Tensor, ids: torch.Tensor, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        count_pairs(counts, ids)
