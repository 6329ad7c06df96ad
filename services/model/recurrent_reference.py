"""The oracle of layers with the gated delta rule, token after token, by definition. No state, no chunks, no speed.

Legend: T tokens of one sequence, D hidden size, C channels of the convolution, W its tokens, G key heads, H value
heads, K and V dimensions of a key's and a value's head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from services.model.recurrent_names import A_LOG, CONV, DT_BIAS, NORM, OUT, in_projections
from services.model.spec import RecurrentSpec

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


def recurrent_output(spec: RecurrentSpec, tensor: Callable[[str], Tensor], h_TD: Tensor, eps: float) -> Tensor:
    """Return what the layer adds to its rows. ``tensor`` gives a tensor of the layer by its name within it."""
    projected = [h_TD @ tensor(name).T for name in in_projections(spec)]
    mixed_TC, z_THV, b_TH, a_TH = _by_head(spec, *projected) if spec.by_head else _by_part(spec, *projected)
    mixed_TC = silu(_convolved(mixed_TC, tensor(CONV)[:, 0]))
    keys = spec.key_heads * spec.key_dim
    q_TC, k_TC, v_TC = mixed_TC.split_with_sizes((keys, keys, spec.values), dim=1)
    repeats = spec.value_heads // spec.key_heads
    q_THK, k_THK = (
        _of_length_one(x_TC.reshape(-1, spec.key_heads, spec.key_dim)).repeat_interleave(repeats, dim=1)
        for x_TC in (q_TC, k_TC)
    )
    v_THV = v_TC.reshape(-1, spec.value_heads, spec.value_dim)
    decay_TH = torch.exp(-tensor(A_LOG).exp() * softplus(a_TH + tensor(DT_BIAS)))
    out_THV = _recurrence(q_THK / spec.key_dim**0.5, k_THK, v_THV, decay_TH, torch.sigmoid(b_TH))
    root = torch.sqrt(out_THV.square().mean(dim=-1, keepdim=True) + eps)
    return (out_THV / root * tensor(NORM) * silu(z_THV)).flatten(1) @ tensor(OUT).T


def _recurrence(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
    """Each token lets the state fade, replaces a part of what its key finds there by its value, and reads it by its
    query: S = decay S + k (beta (v - (decay S)^T k))^T, o = S^T q."""
    state_HKV = torch.zeros(*k_THK.shape[1:], v_THV.shape[2])
    out_THV = torch.empty_like(v_THV)
    for t in range(len(q_THK)):
        state_HKV = state_HKV * decay_TH[t, :, None, None]
        found_HV = torch.einsum("hkv,hk->hv", state_HKV, k_THK[t])
        change_HV = beta_TH[t, :, None] * (v_THV[t] - found_HV)
        state_HKV = state_HKV + k_THK[t, :, :, None] * change_HV[:, None, :]
        out_THV[t] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[t])
    return out_THV


def _convolved(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """Each channel of a token is a weighted sum of it and of the tokens before it; the last weight is its own."""
    width = weight_CW.shape[1]
    padded_XC = pad(x_TC, (0, 0, width - 1, 0))
    return sum((padded_XC[at : at + len(x_TC)] * weight_CW[:, at] for at in range(width)), torch.zeros_like(x_TC))


def _of_length_one(x_TGK: Tensor) -> Tensor:
    return x_TGK / torch.sqrt(x_TGK.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)


def _by_part(spec: RecurrentSpec, mixed_TC: Tensor, z_TC: Tensor, b_TH: Tensor, a_TH: Tensor) -> tuple[Tensor, ...]:
    return mixed_TC, z_TC.view(-1, spec.value_heads, spec.value_dim), b_TH, a_TH


def _by_head(spec: RecurrentSpec, qkvz_TO: Tensor, ba_TO: Tensor) -> tuple[Tensor, ...]:
    """Of each key head there are its query, its key, the values that it serves, and their gates."""
    served = spec.value_heads // spec.key_heads
    sizes = (spec.key_dim, spec.key_dim, served * spec.value_dim, served * spec.value_dim)
    q_TGK, k_TGK, v_TGX, z_TGX = qkvz_TO.view(len(qkvz_TO), spec.key_heads, -1).split_with_sizes(sizes, dim=2)
    b_TGX, a_TGX = ba_TO.view(len(ba_TO), spec.key_heads, -1).chunk(2, dim=2)
    mixed_TC = torch.cat([part.flatten(1) for part in (q_TGK, k_TGK, v_TGX)], dim=1)
    return mixed_TC, z_TGX.reshape(-1, spec.value_heads, spec.value_dim), b_TGX.flatten(1), a_TGX.flatten(1)
