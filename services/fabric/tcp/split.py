"""Splits the rows of a dispatch by shard group and call, and sums the answers. No sockets.

Legend: T rows, D hidden size, K slots per row, S = T x K pairs, R rows of a part, P pairs of a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import combine


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one call to a replica of a shard group, and the ids of the ``experts`` that they chose there.

    All tensors but ``x_RD`` are on the CPU: ``ids_RK`` int32, -1 where a slot's expert is in another group;
    ``weights_RK`` float32; ``index_R`` and ``pairs_P`` int64, the indices among the T rows and the S pairs.
    """

    group: int
    experts: frozenset[int]
    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    index_R: Tensor
    pairs_P: Tensor

    def finite(self) -> bool:
        """Return whether rows and weights are finite, so that healthy experts answer with finite values."""
        return bool(self.x_RD.isfinite().all() and self.weights_RK.isfinite().all())


def split(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, group_of: Sequence[int], max_rows: int) -> Iterator[Rows]:
    """Split rows by shard group, ascending, and within a group into runs of at most ``max_rows`` rows.

    Args:
        x_TD: rows on any device; the other tensors are on the CPU.
        group_of: group number by expert id, for this layer.
    """
    known_TK = (ids_TK >= 0) & (ids_TK < len(group_of))
    group_TK = torch.where(known_TK, torch.tensor(group_of)[ids_TK.clamp(0, len(group_of) - 1)], -1)
    for group in sorted(set(group_TK.flatten().tolist()) - {-1}):
        here_TK = group_TK == group
        for index_R in here_TK.any(1).nonzero().squeeze(1).split(max_rows):
            yield _rows(group, index_R, here_TK, x_TD, ids_TK, weights_TK)


def sum_pairs(parts: Sequence[tuple[Rows, Tensor]], weights_TK: Tensor, x_TD: Tensor) -> Tensor:
    """Return ``y_TD``, in the dtype and on the device of ``x_TD``, from unweighted answers ``[P, D]`` on any device.

    The sum of each row is that of :func:`slot_sum`.
    """
    parts = [(part, _brought(answer, x_TD)) for part, answer in parts]
    if not parts:
        return torch.zeros_like(x_TD)
    if x_TD.device.type != "cpu":
        return _sum_on_device(parts, weights_TK)
    out_SD = x_TD.new_empty(weights_TK.numel(), x_TD.shape[1])
    present_S = torch.zeros(weights_TK.numel(), dtype=torch.bool)
    for part, answer_PD in parts:
        out_SD.index_copy_(0, part.pairs_P, answer_PD)
        present_S[part.pairs_P] = True
    return slot_sum(out_SD, present_S, weights_TK, x_TD.dtype)


def slot_sum(out_SD: Tensor, present_S: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``y_TD`` in ``dtype`` from unweighted outputs: summed in float32, slot 0 first, and rounded once.

    That is how :func:`moe_kernels.fused_moe` adds on a CPU, to the last bit.

    Args:
        out_SD: outputs by row and slot; those of absent pairs may hold anything.
        present_S: bool.
    """
    rows, slots = weights_TK.shape
    out_TKD, present_TK = out_SD.view(rows, slots, out_SD.shape[1]), present_S.view(rows, slots)
    y_TD = torch.zeros(rows, out_SD.shape[1], dtype=torch.float32, device=out_SD.device)
    for slot in range(slots):
        weighted_TD = out_TKD[:, slot] * weights_TK[:, slot : slot + 1]
        # The pair of an absent slot was never written and its weight may be anything: choose, do not multiply by 0.
        weighted_TD = torch.where(present_TK[:, slot : slot + 1], weighted_TD, 0)
        y_TD = y_TD + weighted_TD if slot else weighted_TD.float()
    return y_TD.to(dtype)


def _sum_on_device(parts: Sequence[tuple[Rows, Tensor]], weights_TK: Tensor) -> Tensor:
    """Sum in one kernel; the host knows where in the concatenated answers the row of each pair is."""
    place_S, rows = torch.full((weights_TK.numel(),), -1), 0
    for part, answer_PD in parts:
        place_S[part.pairs_P] = torch.arange(rows, rows + len(answer_PD))
        rows += len(answer_PD)
    answers = [answer_PD for _, answer_PD in parts]
    answers_PD = answers[0] if len(answers) == 1 else torch.cat(answers)
    return combine(answers_PD, place_S.view(weights_TK.shape).to(answers_PD.device), weights_TK.float())


def _brought(answer: Tensor, x_TD: Tensor) -> Tensor:
    if answer.is_cuda:  # it was made on a lane's stream, and is read on the current one
        answer.record_stream(torch.cuda.current_stream(answer.device))
    return answer.to(x_TD.device)


def sum_rows(parts: Sequence[tuple[Rows, Tensor]], x_TD: Tensor) -> Tensor:
    """Return ``y_TD``, like ``x_TD``, from weighted answers ``[R, D]``: summed in float32, in the order of groups.

    Each replica has rounded its answer to the dtype of the rows.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for part, answer_RD in parts:
        y_TD[part.index_R.to(x_TD.device)] += _brought(answer_RD, x_TD)
    return y_TD.to(x_TD.dtype)


def _rows(group: int, index_R: Tensor, here_TK: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Rows:
    every_row = len(index_R) == len(x_TD)
    here_RK, ids_RK = here_TK[index_R], ids_TK[index_R]
    slots = ids_TK.shape[1]
    pairs_RK = index_R.unsqueeze(1) * slots + torch.arange(slots)
    weights_RK = torch.where(here_RK, weights_TK[index_R], 0)
    return Rows(
        group=group,
        experts=frozenset(ids_RK[here_RK].tolist()),
        x_RD=x_TD if every_row else x_TD[index_R.to(x_TD.device)],
        ids_RK=torch.where(here_RK, ids_RK, -1).int(),
        weights_RK=weights_RK.float(),
        index_R=index_R,
        pairs_P=pairs_RK[here_RK],
    )
