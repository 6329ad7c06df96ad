"""The dense part of the model: everything but the experts. A step's rows come in, logits go out.

The loop over the layers, and the exchange with the experts inside it, belong to the attention worker:

    plan = model.plan(inputs, block_size)
    x_TD = model.embed(inputs.token_ids_T)
    for layer, kind in enumerate(spec.layers):
        x_TD = model.attention(layer, x_TD, plan, kv)
        h_TD = model.ffn_input(layer, x_TD)
        ...                                            # dense_ffn, or route, dispatch, shared_expert, combine
        x_TD = x_TD + y_TD
    logits_RV = model.logits(x_TD[inputs.logits_rows_R])

Legend: T rows of the step, R rows whose logits are wanted, D hidden size, V vocabulary, K experts chosen per row,
N query heads, J key/value heads, C = N + J, H head dimension.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import route
from services.model.inputs import PagedKV, StepInputs
from services.model.paged_attention import AttentionPlan, WindowPlanner, attend, compute_dtype, write_kv
from services.model.rope import cos_sin, inverse_frequencies, rotate
from services.model.spec import ModelSpec
from services.model.weights import DenseWeights, FfnWeights, LayerWeights
from services.model.work_lists import WorkLists


class DenseModel:
    """Embedding, attention, router, dense networks and output head, on one device in one dtype.

    Rows never mix but in :meth:`attention`, and there only within a sequence. Call it under
    ``torch.inference_mode()``.
    """

    def __init__(self, spec: ModelSpec, weights: DenseWeights) -> None:
        self.spec = spec
        self.dtype = weights.embed_VD.dtype
        self.device = weights.embed_VD.device
        self._weights = weights
        self.attention_dtype = compute_dtype(self.dtype, self.device)
        self._qk_norms = tuple(self._qk_norm(layer) for layer in weights.layers)
        self._frequency_I = inverse_frequencies(spec.rope, spec.head_dim).to(self.device)
        self._work_lists: WorkLists | None = None
        if self.device.type == "cuda":
            self._work_lists = WorkLists(spec, dtype=self.attention_dtype, device=self.device)

    def plan(self, inputs: StepInputs, block_size: int) -> AttentionPlan:
        """Plan this step's attention, once for all layers. ``block_size`` is the KV cache's."""
        if inputs.paged is None and self._work_lists is not None:
            inputs = replace(inputs, paged=self._work_lists.of(inputs, block_size))
        planner = WindowPlanner(
            block_size=block_size,
            kv_size=self.spec.kv_size,
            mask_dtype=self.attention_dtype,
            device=self.device,
        )
        cos_T1H, sin_T1H = cos_sin(inputs.positions_T, self._frequency_I, self.spec.rope.attention_factor)
        windows = {layer.window for layer in self.spec.layers}
        return AttentionPlan(
            slots_T=inputs.slots_T,
            cos_T1H=cos_T1H,
            sin_T1H=sin_T1H,
            by_window={window: planner.plan(inputs, window) for window in windows},
        )

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows ``x_TD`` that run through the layers."""
        return F.embedding(token_ids_T, self._weights.embed_VD)

    def attention(self, layer: int, x_TD: Tensor, plan: AttentionPlan, kv: PagedKV) -> Tensor:
        """Add the attention of layer ``layer`` to ``x_TD``. Writes the step's keys and values of it into ``kv``."""
        weights = self._weights.layers[layer]
        h_TD = self._norm(x_TD, weights.attention_norm_D)
        q_TNH, k_TJH, v_TJH = self._project(layer, h_TD, plan)
        cache = kv.layer(layer)
        write_kv(cache, plan.slots_T, k_TJH, v_TJH)
        out_TE = attend(plan.by_window[self.spec.layers[layer].window], q_TNH, k_TJH, v_TJH, cache)
        return x_TD + F.linear(out_TE.to(self.dtype), weights.o_DO, weights.o_bias_D)

    def ffn_input(self, layer: int, x_TD: Tensor) -> Tensor:
        """Return the normalised rows ``h_TD``, which router, experts and dense networks read."""
        return self._norm(x_TD, self._weights.layers[layer].ffn_norm_D)

    def route(self, layer: int, h_TD: Tensor, keep_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``expert_ids_TK`` int64 and ``weights_TK`` float32 of a layer with experts.

        Args:
            keep_T: bool; rows where it is false go to no expert: their ids are -1.
        """
        router_ED = self._weights.layers[layer].router_ED
        assert router_ED is not None, f"layer {layer} has no experts"
        flags = self.spec.router
        return route(
            F.linear(h_TD.float(), router_ED),
            top_k=self.spec.top_k,
            score=flags.score,
            order=flags.order,
            renormalise=flags.renormalise,
            scale=flags.scale,
            keep_T=keep_T,
        )

    def dense_ffn(self, layer: int, h_TD: Tensor) -> Tensor:
        """Return the output ``y_TD`` of a layer without experts, to be added to the rows."""
        ffn = self._weights.layers[layer].ffn
        assert ffn is not None, f"layer {layer} has no dense network"
        return _ffn(ffn, h_TD)

    def shared_expert(self, layer: int, h_TD: Tensor) -> Tensor | None:
        """Return gated output ``y_TD`` of the expert that every row passes; None if the model has no such expert."""
        weights = self._weights.layers[layer]
        if weights.ffn is None:
            return None
        assert weights.shared_gate_1D is not None, f"layer {layer} has no shared expert"
        return torch.sigmoid(F.linear(h_TD, weights.shared_gate_1D)) * _ffn(weights.ffn, h_TD)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Return the logits ``logits_RV``, float32, of rows after the last layer."""
        return F.linear(self._norm(x_RD, self._weights.norm_D), self._weights.lm_head_VD).float()

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, self.spec.rms_eps)

    def _project(self, layer: int, h_TD: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated, and values, in the dtype of attention.

        Queries and keys go through each op together, as the heads of one tensor.
        """
        spec, weights = self.spec, self._weights.layers[layer]
        qkv_TO = F.linear(h_TD, weights.qkv_OD, weights.qkv_bias_O).to(self.attention_dtype)
        qk_TO, v_TO = qkv_TO.split_with_sizes((spec.q_size + spec.kv_size, spec.kv_size), dim=1)
        rows, qk_norm = h_TD.shape[0], self._qk_norms[layer]
        if spec.qk_norm == "projection":
            assert qk_norm is not None
            qk_TO = self._norm_projections(qk_TO, qk_norm)
        if spec.clip_qkv is not None:
            qk_TO, v_TO = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (qk_TO, v_TO))
        qk_TCH = qk_TO.view(rows, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm == "head":
            assert qk_norm is not None
            qk_TCH = F.rms_norm(qk_TCH, (spec.head_dim,), None, spec.rms_eps) * qk_norm
        qk_TCH = rotate(qk_TCH, plan.cos_T1H, plan.sin_T1H).to(self.attention_dtype)
        q_TNH, k_TJH = qk_TCH.split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)
        return q_TNH, k_TJH, v_TO.view(rows, spec.num_kv_heads, spec.head_dim)

    def _qk_norm(self, weights: LayerWeights) -> Tensor | None:
        """Return both norms' weights as :meth:`_project` needs them: ``[C, H]`` per head, ``[O]`` per projection."""
        if weights.q_norm is None or weights.k_norm is None:
            return None
        q_norm, k_norm = weights.q_norm, weights.k_norm
        if self.spec.qk_norm == "head":
            q_norm, k_norm = q_norm.expand(self.spec.num_heads, -1), k_norm.expand(self.spec.num_kv_heads, -1)
        return torch.cat((q_norm, k_norm)).to(self.attention_dtype)

    def _norm_projections(self, qk_TO: Tensor, weight_O: Tensor) -> Tensor:
        """Apply the root-mean-square norm over all query heads together, and over all key heads together."""
        sizes = (self.spec.q_size, self.spec.kv_size)
        parts = zip(qk_TO.split_with_sizes(sizes, dim=1), weight_O.split_with_sizes(sizes), strict=True)
        return torch.cat([self._norm(part_TO, part_weight_O) for part_TO, part_weight_O in parts], dim=1)


def _ffn(weights: FfnWeights, h_TD: Tensor) -> Tensor:
    gate_TF, up_TF = F.linear(h_TD, weights.gate_up_2FD).chunk(2, dim=1)
    return F.linear(F.silu(gate_TF).mul_(up_TF), weights.down_DF)
