"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks") and the short convolution before it, on states that
come in and go out. One token of each sequence, or many at once in chunks; all in float32.

A head's state S (K x V) passes a token as S' = decay S + k (beta (v - (decay S)^T k))^T, and o = S'^T q. Over a chunk
of L tokens that enter with S, with G the running sums of log decays and D_ij = exp(G_i - G_j) for j <= i, the changes U
(L x V) that the tokens write solve a triangular system, and all the rest are products of matrices:

    (I + beta K K^T * D, below the diagonal) U = beta (V - exp(G) K S)
    O  = exp(G) Q S + (Q K^T * D) U
    S' = exp(G_L) S + (exp(G_L - G) K)^T U

Legend: B sequences, T rows of a step, N chunks, L tokens of a chunk, H value heads, K and V dimensions of a head's key
and value, C channels of the convolution, W its tokens, P = W - 1 of them past, X rows with the past of each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Most tokens of a chunk: their products take as long as those with the state do."""


def step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, log_decay_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Pass one token of each sequence. Returns ``out_BHV`` and the states after it; queries are scaled already."""
    faded_BHKV = state_BHKV * log_decay_BH.exp()[..., None, None]
    found_BHV = (k_BHK.unsqueeze(2) @ faded_BHKV).squeeze(2)
    change_BHV = beta_BH.unsqueeze(2) * (v_BHV - found_BHV)
    after_BHKV = faded_BHKV + k_BHK.unsqueeze(3) * change_BHV.unsqueeze(2)
    return (q_BHK.unsqueeze(2) @ after_BHKV).squeeze(2), after_BHKV


class Chunks:
    """What tokens do within chunks of ``[N, H, L]`` each, before the states that these enter with are known. Rows that
    are no token's have keys, values and log decays of 0."""

    def __init__(self, q_NHLK: Tensor, k_NHLK: Tensor, v_NHLV: Tensor, log_decay_NHL: Tensor, beta_NHL: Tensor) -> None:
        sum_NHL = log_decay_NHL.cumsum(2)
        later_LL = torch.ones(sum_NHL.shape[2], sum_NHL.shape[2], dtype=torch.bool, device=sum_NHL.device).triu(1)
        between_NHLL = (sum_NHL.unsqueeze(3) - sum_NHL.unsqueeze(2)).masked_fill_(later_LL, -torch.inf).exp_()
        decayed_NHL1 = sum_NHL.exp().unsqueeze(3)
        system_NHLL = beta_NHL.unsqueeze(3) * (k_NHLK @ k_NHLK.mT) * between_NHLL
        wanted_NHLX = torch.cat((v_NHLV, k_NHLK * decayed_NHL1), dim=3) * beta_NHL.unsqueeze(3)
        solved_NHLX = torch.linalg.solve_triangular(system_NHLL, wanted_NHLX, upper=False, unitriangular=True)
        self._own_NHLV, self._reads_NHLK = solved_NHLX.split_with_sizes((v_NHLV.shape[3], k_NHLK.shape[3]), dim=3)
        self._q_NHLK = q_NHLK * decayed_NHL1
        self._among_NHLL = (q_NHLK @ k_NHLK.mT) * between_NHLL
        self._k_NHLK = k_NHLK * (sum_NHL[..., -1:] - sum_NHL).exp().unsqueeze(3)
        self._faded_NH11 = sum_NHL[..., -1].exp()[..., None, None]

    def pass_through(self, chunks: slice, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``out_BHLV`` of ``chunks``, one of each sequence, and the states after them."""
        change_BHLV = self._own_NHLV[chunks] - self._reads_NHLK[chunks] @ state_BHKV
        out_BHLV = self._q_NHLK[chunks] @ state_BHKV + self._among_NHLL[chunks] @ change_BHLV
        return out_BHLV, self._faded_NH11[chunks] * state_BHKV + self._k_NHLK[chunks].mT @ change_BHLV


def convolved(x_XC: Tensor, rows_T: Tensor, weight_CW: Tensor) -> Tensor:
    """Return ``[T, C]``: each channel of the rows ``rows_T`` of ``x_XC`` summed up with the W - 1 rows before it, with
    weights of which the last is the row's own."""
    past = weight_CW.shape[1] - 1
    out_TC = x_XC[rows_T] * weight_CW[:, past]
    for back in range(1, past + 1):
        out_TC += x_XC[rows_T - back] * weight_CW[:, past - back]
    return out_TC


def conv_step(x_BC: Tensor, past_BPC: Tensor, weight_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Do :func:`convolved` for one row of each sequence. Returns that and what the next token looks back to."""
    seen_BWC = torch.cat((past_BPC, x_BC.unsqueeze(1)), dim=1)
    return (seen_BWC * weight_CW.T).sum(1), seen_BWC[:, 1:]


def of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gates(a_TH: Tensor, dt_bias_H: Tensor, decay_H: Tensor) -> Tensor:
    """Return logarithms of decays: ``-decay softplus(a + dt_bias)``."""
    return -decay_H * F.softplus(a_TH + dt_bias_H)
