"""The oracle: a whole model in float32, written from the definition. No cache, no batch, no fabric, no speed.

It shares the spec, the tensors on disk and the rotary frequencies with the serving path, and no other code.
Legend: T tokens of one sequence, V vocabulary, D hidden size, E experts, K experts chosen, G groups of experts, N query
heads, H head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, sigmoid, silu

from services.config import ExpertFormat
from services.model.checkpoint import Checkpoint
from services.model.held_experts import held_experts
from services.model.load_spec import load_spec
from services.model.names import EMBED, FINAL_NORM, LM_HEAD, FfnNames, TensorNames, dense_shapes
from services.model.recurrent_reference import recurrent_output
from services.model.rope import inverse_frequencies
from services.model.spec import LatentSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """Logits, and ``router_margin_T``: the smallest gap, over the layers, between what the last expert chosen and the
    first one not were compared by, and between the last group chosen and the first one not; infinite if all are chosen.
    At a small gap another rounding may choose others."""

    logits_TV: Tensor
    router_margin_T: Tensor


def in_integers(weight_OI: Tensor, bits: int, group: int) -> Tensor:
    """Return what integers of ``bits`` bits with a scale for each ``group`` columns make of a weight, in float32.

    The value of largest magnitude gets the code -8 of 4 bits or 127 of 8, or in 8 bits -127 if it is negative; the
    scale that brings it there is rounded to float16 and is 2 ** -24 at least, unless all values are 0.
    """
    w_OI = weight_OI.float()
    return torch.cat([_in_integers(w_OC, bits) for w_OC in torch.split(w_OI, group or w_OI.shape[1], dim=1)], dim=1)


def _in_integers(w_OC: Tensor, bits: int) -> Tensor:
    """Return what :func:`in_integers` makes of the columns of one group."""
    extreme_O = w_OC[torch.arange(len(w_OC)), w_OC.abs().argmax(1)]
    scale_O = extreme_O / -8 if bits == 4 else extreme_O.abs() / 127
    scale_O = torch.where(scale_O.abs() < 2.0**-24, torch.sign(scale_O) * 2.0**-24, scale_O).half().float()
    lowest, highest = (-8, 7) if bits == 4 else (-127, 127)
    code_OC = (w_OC / torch.where(scale_O == 0, 1.0, scale_O)[:, None]).round().clamp(lowest, highest)
    return code_OC * scale_O[:, None]


def in_fp8(weight_OI: Tensor) -> Tensor:
    """Return what FP8 (E4M3) with a scale for each block of 128 x 128 makes of a weight: the largest value is 448."""
    out_OI = weight_OI.float().clone()
    for rows in torch.split(out_OI, 128):
        for block in torch.split(rows, 128, dim=1):
            scale = block.abs().max() / 448
            if scale > 0:
                block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return out_OI


def in_mxfp4(weight_OI: Tensor) -> Tensor:
    """Return what MXFP4 makes of a weight: 32 columns share a power of 2, four times less than that of the largest
    value. Each value becomes the nearest number of E2M1, halfway that with the even code."""
    even_first = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])
    out_OI = weight_OI.float().clone()
    for columns in torch.split(out_OI, 32, dim=1):
        power_O1 = torch.exp2(torch.frexp(columns.abs().amax(1, keepdim=True)).exponent - 3.0)
        distance = (columns.abs() / power_O1).unsqueeze(2) - even_first
        columns.copy_(even_first[distance.abs().argmin(2)] * power_O1 * columns.sign())
    return out_OI


ROUNDED: Mapping[ExpertFormat, Callable[[Tensor], Tensor]] = {
    "int8": partial(in_integers, bits=8, group=0),
    "int4": partial(in_integers, bits=4, group=128),
    "int4-channel": partial(in_integers, bits=4, group=0),
    "fp8": in_fp8,
    "mxfp4": in_mxfp4,
}


class ReferenceModel:
    """Computes a checkpoint's logits by definition. ``tensors`` has every tensor of the model by its name on disk.
    ``on_choice`` gets the number of each layer that has experts, and ``[T, K]`` those that its router chose."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        on_choice: Callable[[int, Tensor], None] = lambda _layer, _expert_TK: None,
    ) -> None:
        self.spec = spec
        self._on_choice = on_choice
        self._names = TensorNames(spec.family)
        self._tensors = {name: tensor.float() for name, tensor in tensors.items()}

    @classmethod
    def load(
        cls,
        model_dir: Path,
        on_choice: Callable[[int, Tensor], None] = lambda _layer, _expert_TK: None,
        expert_format: ExpertFormat = "dense",
    ) -> Self:
        """Read a checkpoint. Its experts are what ``expert_format`` makes of them: "dense" and "auto" round nothing,
        others nothing that the checkpoint has in just that form."""
        spec = load_spec(model_dir)
        with Checkpoint(model_dir, spec) as checkpoint:
            tensors = {name: checkpoint.read(name) for name in dense_shapes(spec)}
            held = held_experts(spec, expert_format, checkpoint.kind, model_dir)
            for layer, expert in product(spec.moe_layers, range(spec.num_experts)):
                ffn = TensorNames(spec.family).expert(layer, expert)
                matrices = ffn.matrices
                kept = expert_format not in ROUNDED or {*map(checkpoint.kind, matrices)} == {held.of(layer)}
                made = (lambda weight_OI: weight_OI) if kept else ROUNDED[expert_format]
                tensors |= {name: made(checkpoint.read(name)) for name in matrices}
                if spec.expert_bias:
                    tensors |= {name: checkpoint.read(name) for name in ffn.biases}
            return cls(spec, tensors, on_choice)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return ``[T, V]`` float32: row t predicts the token after ``token_ids[t]``."""
        return self.run(token_ids).logits_TV

    @torch.no_grad()
    def run(self, token_ids: Sequence[int]) -> ReferenceOutput:
        x_TD = embedding(torch.tensor(token_ids), self._tensors[EMBED])
        margin_T = torch.full((len(token_ids),), math.inf)
        for layer in range(self.spec.num_layers):
            h_TD = self._norm(x_TD, self._names.layer(layer, "input_layernorm.weight"))
            mixed = self._recurrence if self.spec.layers[layer].recurrent else self._attention
            x_TD = x_TD + mixed(layer, h_TD)
            h_TD = self._norm(x_TD, self._names.layer(layer, "post_attention_layernorm.weight"))
            if self.spec.layers[layer].kind == "dense":
                y_TD = self._ffn(self._names.dense_ffn(layer), h_TD)
            else:
                y_TD, layer_margin_T = self._experts(layer, h_TD)
                margin_T = torch.minimum(margin_T, layer_margin_T)
            x_TD = x_TD + y_TD
        head_VD = self._tensors[EMBED if self.spec.tie_embeddings else LM_HEAD]
        return ReferenceOutput(linear(self._norm(x_TD, FINAL_NORM), head_VD), margin_T)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        root = torch.sqrt(x.square().mean(dim=-1, keepdim=True) + self.spec.rms_eps)
        return x / root * (self._tensors[name] + self.spec.centred_norms)

    def _ffn(self, names: FfnNames, h_TD: Tensor) -> Tensor:
        gate, up, down = (self._tensors[name] for name in names.matrices)
        return (silu(h_TD @ gate.T) * (h_TD @ up.T)) @ down.T

    def _expert(self, names: FfnNames, h_TD: Tensor) -> Tensor:
        """Return :meth:`_ffn` of an expert; with ``swiglu_oai`` and biases, as gpt-oss defines it."""
        if self.spec.expert_activation == "swiglu":
            return self._ffn(names, h_TD)
        gate, up, down = (self._tensors[name] for name in names.matrices)
        gate_bias, up_bias, down_bias = (self._tensors[name] for name in names.biases)
        gate_TF = (h_TD @ gate.T + gate_bias).clamp(max=7.0)
        up_TF = (h_TD @ up.T + up_bias).clamp(-7.0, 7.0)
        return ((up_TF + 1) * (gate_TF * sigmoid(1.702 * gate_TF))) @ down.T + down_bias

    def _attention(self, layer: int, h_TD: Tensor) -> Tensor:
        spec = self.spec
        if spec.latent is None:
            q_NTH, k_NTH, v_NTH = (self._heads(layer, part, h_TD) for part in "qkv")
        else:
            q_NTH, k_NTH, v_NTH = self._heads_of_latents(layer, spec.latent, h_TD)
        scale = spec.latent.scale if spec.latent else 1 / math.sqrt(spec.head_dim)
        position_T = torch.arange(h_TD.shape[0])
        distance_TT = position_T[:, None] - position_T[None, :]
        window = spec.layers[layer].window or h_TD.shape[0]
        seen_TT = (distance_TT >= 0) & (distance_TT < window)
        score_NTT = (q_NTH @ k_NTH.transpose(1, 2)) * scale
        score_NTT = score_NTT.masked_fill(~seen_TT, -math.inf)
        if spec.sinks:
            sink_NT1 = self._tensors[self._names.sinks(layer)][:, None, None].expand(-1, len(h_TD), 1)
            share_NTT = torch.softmax(torch.cat((score_NTT, sink_NT1), dim=-1), dim=-1)[..., :-1]
        else:
            share_NTT = torch.softmax(score_NTT, dim=-1)
        out_NTH = share_NTT @ v_NTH
        out_TE = out_NTH.transpose(0, 1).flatten(1)
        return self._linear(layer, "o", out_TE * self._gate(layer, h_TD) if spec.output_gate else out_TE)

    def _recurrence(self, layer: int, h_TD: Tensor) -> Tensor:
        assert self.spec.recurrent is not None
        part = lambda name: self._tensors[self._names.layer(layer, name)]  # noqa: E731
        return recurrent_output(self.spec.recurrent, part, h_TD, self.spec.rms_eps)

    def _gate(self, layer: int, h_TD: Tensor) -> Tensor:
        """Return the gate of attention's output, whose projection lies behind that of each query head."""
        x_TO = self._linear(layer, "q", h_TD)
        return torch.sigmoid(x_TO.view(len(h_TD), self.spec.num_heads, -1)[..., self.spec.head_dim :].flatten(1))

    def _heads(self, layer: int, part: str, h_TD: Tensor) -> Tensor:
        """Return queries, keys or values ``[N, T, H]``; a key or value head is repeated for each query reading it."""
        spec, norm = self.spec, self._names.layer(layer, f"self_attn.{part}_norm.weight")
        x_TO = self._linear(layer, part, h_TD)
        if part == "q" and spec.output_gate:
            x_TO = x_TO.view(len(h_TD), spec.num_heads, -1)[..., : spec.head_dim].flatten(1)
        if spec.qk_norm == "projection" and part != "v":
            x_TO = self._norm(x_TO, norm)
        if spec.clip_qkv is not None:
            x_TO = x_TO.clamp(-spec.clip_qkv, spec.clip_qkv)
        x_TNH = x_TO.view(h_TD.shape[0], -1, spec.head_dim)
        if spec.qk_norm == "head" and part != "v":
            x_TNH = self._norm(x_TNH, norm)
        x_NTH = x_TNH.transpose(0, 1)
        if part != "v" and spec.layers[layer].rotated:
            x_NTH = self._rotated(x_NTH)
        return x_NTH.repeat_interleave(spec.num_heads // x_NTH.shape[0], dim=0)

    def _heads_of_latents(self, layer: int, latent: LatentSpec, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[N, T, H]``, the last ones ``[N, T, V]``, of multi-head latent attention
        (DeepSeek-V2, section 2.1, equations 37 to 47): each head has its own, and all share a part of their keys."""
        heads = self.spec.num_heads

        def normed(part: str, x_TL: Tensor) -> Tensor:
            root = torch.sqrt(x_TL.square().mean(dim=-1, keepdim=True) + latent.eps)
            return x_TL / root * self._tensors[self._names.layer(layer, f"self_attn.{part}_layernorm.weight")]

        if latent.query_rank:
            q_TO = self._linear(layer, "q_b", normed("q_a", self._linear(layer, "q_a", h_TD)))
        else:
            q_TO = self._linear(layer, "q", h_TD)
        q_NTH = q_TO.view(len(h_TD), heads, -1).transpose(0, 1)
        q_plain, q_turned = q_NTH.split_with_sizes((latent.plain, latent.rotated), dim=2)
        projected = self._tensors[self._names.layer(layer, "self_attn.kv_a_proj_with_mqa.weight")]
        bias = self._tensors.get(self._names.layer(layer, "self_attn.kv_a_proj_with_mqa.bias"), torch.zeros(()))
        latent_TC, k_TR = (h_TD @ projected.T + bias).split_with_sizes((latent.rank, latent.rotated), dim=1)
        kv_TO = self._linear(layer, "kv_b", normed("kv_a", latent_TC))
        kv_NTH = kv_TO.view(len(h_TD), heads, -1).transpose(0, 1)
        k_plain, v_NTV = kv_NTH.split_with_sizes((latent.plain, latent.value), dim=2)
        k_turned = self._turned(k_TR.unsqueeze(0)).expand(heads, -1, -1)
        return torch.cat((q_plain, self._turned(q_turned)), 2), torch.cat((k_plain, k_turned), 2), v_NTV

    def _rotated(self, x_NTH: Tensor) -> Tensor:
        """Take dimensions i and i + H/2 as a complex number, and turn it by position x frequency. Of a head that is
        rotated in part its first dimensions are the H; of an interleaved one dimensions 2i and 2i + 1 are the pair."""
        rope = self.spec.rope
        if rope.dim and rope.dim < x_NTH.shape[2]:
            return torch.cat((self._turned(x_NTH[..., : rope.dim]), x_NTH[..., rope.dim :]), dim=-1)
        return self._turned(x_NTH)

    def _turned(self, x_NTH: Tensor) -> Tensor:
        rope = self.spec.rope
        angle_TI = torch.outer(torch.arange(x_NTH.shape[1]).float(), inverse_frequencies(rope, self.spec.head_dim))
        turn_TI = torch.polar(torch.full_like(angle_TI, rope.attention_factor), angle_TI)
        if rope.interleaved:
            turned_NTI = torch.complex(x_NTH[..., 0::2], x_NTH[..., 1::2]) * turn_TI
            return torch.stack((turned_NTI.real, turned_NTI.imag), dim=-1).flatten(2)
        real_NTI, imaginary_NTI = x_NTH.contiguous().chunk(2, dim=-1)
        turned_NTI = torch.complex(real_NTI, imaginary_NTI) * turn_TI
        return torch.cat((turned_NTI.real, turned_NTI.imag), dim=-1)

    def _experts(self, layer: int, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the chosen experts and the shared one for each token, and the margin of the choice."""
        weight_TK, expert_TK, margin_T = self._choice(layer, h_TD)
        self._on_choice(layer, expert_TK)
        y_TD = torch.zeros_like(h_TD)
        for expert in sorted(set(expert_TK.flatten().tolist())):
            token, slot = (expert_TK == expert).nonzero(as_tuple=True)
            y_TD[token] += weight_TK[token, slot, None] * self._expert(self._names.expert(layer, expert), h_TD[token])
        if self.spec.shared_ffn:
            y_TD = y_TD + self._shared_expert(layer, h_TD)
        return y_TD, margin_T

    def _shared_expert(self, layer: int, h_TD: Tensor) -> Tensor:
        y_TD = self._ffn(self._names.shared_expert(layer), h_TD)
        if not self.spec.shared_gated:
            return y_TD
        return torch.sigmoid(h_TD @ self._tensors[self._names.shared_gate(layer)].T) * y_TD

    def _choice(self, layer: int, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weight and the number of each expert that is chosen, and the margin of the choice."""
        flags = self.spec.router
        logit_TE = h_TD @ self._tensors[self._names.router(layer)].T
        if flags.logit_bias:
            logit_TE = logit_TE + self._tensors[self._names.router_logit_bias(layer)]
        value_TE = self._scored(logit_TE) if flags.order == "score_first" else logit_TE
        compared_TE = value_TE + self._tensors[self._names.router_bias(layer)].flatten() if flags.bias else value_TE
        margin_T = torch.full((len(h_TD),), math.inf)
        if flags.groups > 1:
            allowed_TE, margin_T = self._in_the_best_groups(compared_TE)
            compared_TE = compared_TE.masked_fill(~allowed_TE, -math.inf)
        expert_TK, expert_margin_T = _largest(compared_TE, self.spec.top_k)
        weight_TK = value_TE.gather(1, expert_TK)
        if flags.order == "choose_first":
            weight_TK = self._scored(weight_TK)
        if flags.renormalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        return weight_TK * flags.scale, expert_TK, torch.minimum(margin_T, expert_margin_T)

    def _scored(self, logit_TE: Tensor) -> Tensor:
        return torch.softmax(logit_TE, dim=-1) if self.spec.router.score == "softmax" else torch.sigmoid(logit_TE)

    def _in_the_best_groups(self, compared_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return which experts lie in a token's best groups, and the margin of these. Groups are equal runs of experts,
        and compared by their best expert, or by the sum of their two best."""
        flags = self.spec.router
        compared_TGW = compared_TE.view(len(compared_TE), flags.groups, -1)
        summands = 1 if flags.group_score == "max" else 2
        score_TG = compared_TGW.sort(dim=2, descending=True).values[..., :summands].sum(dim=2)
        group_TB, margin_T = _largest(score_TG, flags.top_groups)
        chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter(1, group_TB, True)
        return chosen_TG.repeat_interleave(compared_TGW.shape[2], dim=1), margin_T

    def _linear(self, layer: int, part: str, h_TD: Tensor) -> Tensor:
        prefix = self._names.layer(layer, f"self_attn.{part}_proj")
        y_TO = h_TD @ self._tensors[f"{prefix}.weight"].T
        bias = self._tensors.get(f"{prefix}.bias")
        return y_TO if bias is None else y_TO + bias


def _largest(value_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return where each row's ``count`` largest values are, and the gap to the next one."""
    ranked_TE, place_TE = value_TE.sort(dim=-1, descending=True, stable=True)
    next_T = ranked_TE[:, count] if count < value_TE.shape[1] else torch.full((len(value_TE),), -math.inf)
    return place_TE[:, :count], ranked_TE[:, count - 1] - next_T
