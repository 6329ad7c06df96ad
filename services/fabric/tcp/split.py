"""Rows of a dispatch to parts, one per shard group and call; answers back to the sum. No sockets.

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
    """What goes to one replica of a shard group in one call."""

    group: int
    experts: frozenset[int]
    """Those that the rows chose in this group."""
    x_RD: Tensor
    """On the device of the dispatch or on the CPU; the others are on the CPU."""
    ids_RK: Tensor
    """int32, -1 where the slot's expert is in another group."""
    weights_RK: Tensor
    index_R: Tensor
    """Which of the T rows these are."""
    pairs_P: Tensor
    """Which of the S pairs the answer's rows are, unless it is reduced."""

    def finite(self) -> bool:
        """Whether the experts may be expected to answer with finite values."""
        return bool(self.x_RD.isfinite().all() and self.weights_RK.isfinite().all())


def split(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, group_of: Sequence[int], most_rows: int) -> Iterator[Rows]:
    """By shard group, ascending, and within a group in runs of at most ``most_rows`` rows.

    Args:
        x_TD: on any device; the others on the CPU.
        group_of: group number by expert id, of this layer.
    """
    known_TK = (ids_TK >= 0) & (ids_TK < len(group_of))
    group_TK = torch.where(known_TK, torch.tensor(group_of)[ids_TK.clamp(0, len(group_of) - 1)], -1)
    for group in sorted(set(group_TK.flatten().tolist()) - {-1}):
        here_TK = group_TK == group
        for index_R in here_TK.any(1).nonzero().squeeze(1).split(most_rows):
            yield _rows(group, index_R, here_TK, x_TD, ids_TK, weights_TK)


def sum_pairs(parts: Sequence[tuple[Rows, Tensor]], weights_TK: Tensor, x_TD: Tensor) -> Tensor:
    """``y_TD`` from unweighted answers ``[P, D]``: float32, slot 0 first, rounded once.

    That is how :func:`moe_kernels.fused_moe` adds on a CPU, to the last bit. Answers elsewhere are brought to
    the device of ``x_TD``.
    """
    parts = [(part, _brought(answer, x_TD)) for part, answer in parts]
    if not parts:
        return torch.zeros_like(x_TD)
    if x_TD.device.type != "cpu":
        return _sum_on_device(parts, weights_TK)
    rows, slots = weights_TK.shape
    out_SD = x_TD.new_empty(rows * slots, x_TD.shape[1])
    present_S = torch.zeros(rows * slots, dtype=torch.bool)
    for part, answer_PD in parts:
        out_SD.index_copy_(0, part.pairs_P, answer_PD)
        present_S[part.pairs_P] = True
    out_TKD, present_TK = out_SD.view(rows, slots, x_TD.shape[1]), present_S.view(rows, slots)
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for slot in range(slots):
        weighted_TD = out_TKD[:, slot] * weights_TK[:, slot : slot + 1]
        # The pair of an absent slot was never written and its weight may be anything: choose, do not multiply by 0.
        weighted_TD = torch.where(present_TK[:, slot : slot + 1], weighted_TD, 0)
        y_TD = y_TD + weighted_TD if slot else weighted_TD
    return y_TD.to(x_TD.dtype)


def _sum_on_device(parts: Sequence[tuple[Rows, Tensor]], weights_TK: Tensor) -> Tensor:
    """One kernel: where each pair's row is in the answers, one after the other, is known on the host."""
    place_S, rows = torch.full((weights_TK.numel(),), -1), 0
    for part, answer_PD in parts:
        place_S[part.pairs_P] = torch.arange(rows, rows + len(answer_PD))
        rows += len(answer_PD)
    answers = [answer_PD for _, answer_PD in parts]
    answers_PD = answers[0] if len(answers) == 1 else torch.cat(answers)
    return combine(answers_PD, place_S.view(weights_TK.shape).to(answers_PD.device), weights_TK.float())


def _brought(answer: Tensor, x_TD: Tensor) -> Tensor:
    if answer.is_cuda:  # it was made in a lane's stream, and is read in this one
        answer.record_stream(torch.cuda.current_stream(answer.device))
    return answer.to(x_TD.device)


def sum_rows(parts: Sequence[tuple[Rows, Tensor]], x_TD: Tensor) -> Tensor:
    """``y_TD`` from weighted answers ``[R, D]``, which each replica has rounded: float32, in the order of groups."""
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
