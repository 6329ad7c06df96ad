"""What a recurrent layer adds to a step's rows: projections, convolution, gated delta rule, norm with a gate.

Legend: T rows of the step, B decodes, R rows of pieces, D hidden size, O columns of the projections, C channels of the
convolution, G key heads, H value heads, K and V dimensions of a head's key and value, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.model.delta_rule import Chunks, conv_step, convolved, gates, of_length_one, step
from services.model.spec import RecurrentSpec
from services.model.state_plan import PiecePlan, StatePlan

States = tuple[Tensor, Tensor]
"""Of one layer, by slot: what the convolution looks back to, and the matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentWeights:
    """What a recurrent layer has beside its projections. ``dt_bias_H`` and ``a_log_H`` are float32."""

    conv_C1W: Tensor
    dt_bias_H: Tensor
    a_log_H: Tensor
    norm_V: Tensor


class Recurrence:
    """The recurrence of one layer: all of it but the projections of its input and output, in float32."""

    def __init__(self, spec: RecurrentSpec, weights: RecurrentWeights, eps: float) -> None:
        self._spec, self._eps = spec, eps
        self._conv_CW = weights.conv_C1W.squeeze(1).float()
        self._dt_bias_H, self._decay_H = weights.dt_bias_H, weights.a_log_H.exp()
        self._norm_V = weights.norm_V.float()

    def __call__(self, projected_TO: Tensor, plan: StatePlan, states: States) -> Tensor:
        """Return ``[T, H x V]`` float32, to be projected to the rows. Moves ``states`` on."""
        spec = self._spec
        mixed_TC, z_THV, b_TH, a_TH = self._parts(projected_TO.float())
        decodes = len(plan.read_B)
        q_THK, k_THK, v_THV = self._heads(F.silu(self._convolved(mixed_TC, plan, states[0])))
        rows = q_THK, k_THK, v_THV, gates(a_TH, self._dt_bias_H, self._decay_H), torch.sigmoid(b_TH)
        out_THV = torch.empty_like(v_THV) if plan.pieces is not None else v_THV
        if decodes:
            q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH = (one[:decodes] for one in rows)
            out_BHV, after_BHKV = step(q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, states[1][plan.read_B])
            states[1].index_copy_(0, plan.write_B, after_BHKV)
            out_THV[:decodes] = out_BHV
        if plan.pieces is not None:
            out_THV[decodes:] = _in_chunks(plan.pieces, tuple(one[decodes:] for one in rows), states[1])
        scale_TH1 = torch.rsqrt(out_THV.square().mean(2, keepdim=True) + self._eps)
        return (out_THV * scale_TH1 * self._norm_V * F.silu(z_THV)).view(-1, spec.values)

    def _parts(self, projected_TO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values as the convolution takes them, and what gates the output, what is written
        and the decay."""
        spec = self._spec
        heads, channels = spec.value_heads, spec.channels
        if not spec.by_head:
            mixed_TC, z_TX, b_TH, a_TH = projected_TO.split_with_sizes((channels, spec.values, heads, heads), dim=1)
            return mixed_TC, z_TX.reshape(-1, heads, spec.value_dim), b_TH, a_TH
        served = heads // spec.key_heads
        qkvz_TO, ba_TO = projected_TO.split_with_sizes((channels + spec.values, 2 * heads), dim=1)
        sizes = (spec.key_dim, spec.key_dim, served * spec.value_dim, served * spec.value_dim)
        q_TGK, k_TGK, v_TGX, z_TGX = qkvz_TO.reshape(len(qkvz_TO), spec.key_heads, -1).split_with_sizes(sizes, dim=2)
        b_TGX, a_TGX = ba_TO.reshape(len(ba_TO), spec.key_heads, -1).chunk(2, dim=2)
        mixed_TC = torch.cat((q_TGK.flatten(1), k_TGK.flatten(1), v_TGX.flatten(1)), dim=1)
        return mixed_TC, z_TGX.reshape(-1, heads, spec.value_dim), b_TGX.flatten(1), a_TGX.flatten(1)

    def _convolved(self, mixed_TC: Tensor, plan: StatePlan, past_SPC: Tensor) -> Tensor:
        decodes, pieces = len(plan.read_B), plan.pieces
        parts = []
        if decodes:
            out_BC, after_BPC = conv_step(mixed_TC[:decodes], past_SPC[plan.read_B], self._conv_CW)
            past_SPC.index_copy_(0, plan.write_B, after_BPC)
            parts.append(out_BC)
        if pieces is not None:
            x_XC = mixed_TC.new_empty(len(pieces.rows_R) + pieces.past_SP.numel(), mixed_TC.shape[1])
            x_XC[pieces.rows_R] = mixed_TC[decodes:]
            x_XC[pieces.past_SP] = past_SPC[pieces.read_S]
            past_SPC.index_copy_(0, pieces.conv_E, x_XC[pieces.tails_EP])
            parts.append(convolved(x_XC, pieces.rows_R, self._conv_CW))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _heads(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        keys = spec.key_heads * spec.key_dim
        q_TX, k_TX, v_TX = x_TC.split_with_sizes((keys, keys, spec.values), dim=1)
        served = spec.value_heads // spec.key_heads
        q_THK, k_THK = (
            of_length_one(one_TX.reshape(len(one_TX), spec.key_heads, -1)).repeat_interleave(served, dim=1)
            for one_TX in (q_TX, k_TX)
        )
        return q_THK * spec.key_dim**-0.5, k_THK, v_TX.reshape(-1, spec.value_heads, spec.value_dim)


def _in_chunks(plan: PiecePlan, rows: tuple[Tensor, ...], states_SHKV: Tensor) -> Tensor:
    """Return ``out_RHV`` of rows with their queries, keys, values, log decays and shares that are written."""
    chunks = Chunks(*(F.pad(one, (0, 0) * (one.dim() - 1) + (0, 1))[plan.rows_NL].transpose(1, 2) for one in rows))
    state_SHKV, outs = states_SHKV[plan.read_S], []
    for one in plan.passes:
        out_SHLV, state_SHKV = chunks.pass_through(one.chunks, state_SHKV[: one.chunks.stop - one.chunks.start])
        if len(one.write_E):
            states_SHKV.index_copy_(0, one.write_E, state_SHKV[one.ends_E])
        outs.append(out_SHLV)
    return torch.cat(outs).transpose(1, 2).flatten(0, 1)[plan.places_R]
