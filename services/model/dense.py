"""The dense part of the model: everything but the experts. A step's rows come in, logits go out.

The loop over the layers, and the exchange with the experts inside it, belong to the attention worker:

    plan = model.plan(inputs, block_size)
    x_TD, added = model.embed(inputs.token_ids_T), ()
    for layer, kind in enumerate(spec.layers):
        x_TD, y_TD = model.attention(layer, x_TD, added, plan, kv)
        x_TD, h_TD = model.ffn_input(layer, x_TD, y_TD)
        added = ...                                    # of dense_ffn, or of combine and shared_expert
    logits_RV = model.logits(summed(x_TD, added)[inputs.logits_rows_R])

What a block adds to the rows travels beside them, for the norm that follows adds it in passing.
Legend: T rows of the step, R rows whose logits are wanted, D hidden size, V vocabulary, K experts chosen per row,
N query heads, J key/value heads, C = N + J, H head dimension, R how many of it are rotated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels import route
from moe_kernels.add_rms_norm.op import add_rms_norm
from moe_kernels.qk_norm_rope.op import qk_norm_rope_write
from services.model.inputs import PagedKV, StepInputs
from services.model.latent_attention import LatentAttention
from services.model.latent_plan import LatentPlanner
from services.model.paged_attention import AttentionPlan, WindowPlan, WindowPlanner, attend, compute_dtype
from services.model.products import FastestProducts, Products
from services.model.recurrent import Recurrence
from services.model.rope import cos_sin, inverse_frequencies
from services.model.spec import ModelSpec
from services.model.state_plan import StatePlan, plan_states
from services.model.tiled_attention import TilePlanner
from services.model.weights import DenseWeights, FfnWeights, LayerWeights
from services.model.work_lists import WorkLists

Added = tuple[Tensor, ...]
"""What at most two blocks add to rows and no norm has added yet."""


class DenseModel:
    """Embedding, attention, router, dense networks and output head, on one device in one dtype.

    Rows never mix but in :meth:`attention`, and there only within a sequence. Call it under
    ``torch.inference_mode()``.

    Args:
        products: how rows are multiplied.
    """

    def __init__(self, spec: ModelSpec, weights: DenseWeights, products: Products | None = None) -> None:
        self.spec = spec
        self.products = products or FastestProducts()
        self.dtype = weights.embed_VD.dtype
        self.device = weights.embed_VD.device
        self._weights = weights
        self.attention_dtype = compute_dtype(self.dtype, self.device)
        self._qk_norms = tuple(self._qk_norm(layer) for layer in weights.layers)
        self._norms = tuple((self._scale(one.attention_norm_D), self._scale(one.ffn_norm_D)) for one in weights.layers)
        self._last_norm_D = self._scale(weights.norm_D)
        self._recurrences = [self._recurrence(layer) for layer in weights.layers]
        self._frequency_I = inverse_frequencies(spec.rope, spec.head_dim).to(self.device)
        self._latent: LatentAttention | None = None
        self._work_lists: WorkLists | None = None
        if spec.latent is not None:
            self._latent = LatentAttention(spec, spec.latent, self.products, self.attention_dtype)
        elif self.device.type == "cuda":
            self._work_lists = self.work_lists()

    def work_lists(self) -> WorkLists | None:
        """Return what plans attention by work lists for this model; None: none does, as of latents."""
        if self._latent is not None:
            return None
        uniform = self.products.invariant
        return WorkLists(self.spec, dtype=self.attention_dtype, device=self.device, uniform=uniform)

    def plan(self, inputs: StepInputs, block_size: int) -> AttentionPlan:
        """Plan this step's attention, once for all layers. ``block_size`` is the KV cache's."""
        if inputs.paged is None and self._work_lists is not None:
            inputs = replace(inputs, paged=self._work_lists.of(inputs, block_size))
        cos_T1R, sin_T1R = cos_sin(
            inputs.positions_T, self._frequency_I, self.spec.rope.attention_factor, self.products.each
        )
        latent = self.spec.latent
        windows = {layer.window for layer in self.spec.layers} if latent is None else ()
        return AttentionPlan(
            slots_T=inputs.slots_T,
            cos_T1R=cos_T1R,
            sin_T1R=sin_T1R,
            latent=None
            if latent is None
            else LatentPlanner(latent, block_size=block_size, device=self.device).plan(inputs),
            by_window={window: self._window_plan(inputs, window, block_size) for window in windows},
            states=self._states(inputs),
        )

    def _states(self, inputs: StepInputs) -> StatePlan | None:
        recurrent = self.spec.recurrent
        return None if recurrent is None else plan_states(inputs, recurrent.conv - 1, self.device)

    def _window_plan(self, inputs: StepInputs, window: int | None, block_size: int) -> WindowPlan:
        if (self.products.invariant or self.spec.sinks) and inputs.paged is None:
            planner = TilePlanner(self.spec, block_size, self.device)
            return WindowPlan(decode=(), prompts=(), tiles=planner.plan(inputs, window))
        return WindowPlanner(
            block_size=block_size,
            kv_size=self.spec.kv_size,
            mask_dtype=self.attention_dtype,
            device=self.device,
        ).plan(inputs, window)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows ``x_TD`` that run through the layers."""
        return F.embedding(token_ids_T, self._weights.embed_VD)

    def attention(
        self, layer: int, x_TD: Tensor, added: Added, plan: AttentionPlan, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        """Return the rows with ``added``, and what the attention of layer ``layer``, or its recurrence, adds to them.

        Writes the step's keys and values of the layer, or the states after it, into ``kv``.
        """
        weights = self._weights.layers[layer]
        x_TD, h_TD = self._norm(x_TD, added, self._norms[layer][0])
        if self._latent is not None:
            out_TE = self._latent(weights, h_TD, plan, kv.latents(layer))
            return x_TD, self.products.linear(out_TE, weights.o_DO, weights.o_bias_D)
        projected_TO = self.products.linear(h_TD, weights.qkv_OD, weights.qkv_bias_O)
        recurrence = self._recurrences[layer]
        if recurrence is None:
            out_TE = self._attended(layer, projected_TO.to(self.attention_dtype), plan, kv)
        else:
            assert plan.states is not None
            out_TE = recurrence(projected_TO, plan.states, kv.states(layer))
        return x_TD, self.products.linear(out_TE.to(self.dtype), weights.o_DO, weights.o_bias_D)

    def _attended(self, layer: int, qkv_TO: Tensor, plan: AttentionPlan, kv: PagedKV) -> Tensor:
        window_plan = plan.by_window[self.spec.layers[layer].window]
        gate_TE = None
        if self.spec.output_gate:
            qkv_TO, gate_TE = self._without_gate(qkv_TO)
        cache = kv.layer(layer)
        rotated = plan.cos_T1R.shape[2] if self.spec.layers[layer].rotated else 0
        angles = plan.cos_T1R[..., :rotated], plan.sin_T1R[..., :rotated]
        q_TNH, own = qk_norm_rope_write(
            qkv_TO,
            *angles,
            *cache,
            plan.slots_T,
            norm="projection" if self.spec.qk_norm == "projection" else "head",
            weight_CH=self._qk_norms[layer],
            eps=self.spec.rms_eps,
            clip=self.spec.clip_qkv,
            interleaved=self.spec.rope.interleaved,
            kv=window_plan.reads_own,
        )
        out_TE = attend(window_plan, q_TNH, own, cache, self._weights.layers[layer].sinks_N)
        return out_TE if gate_TE is None else out_TE * torch.sigmoid(gate_TE)

    def _without_gate(self, qkv_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values, and the gate, which lies behind each query head."""
        spec = self.spec
        qg_TO, kv_TO = qkv_TO.split_with_sizes((spec.q_rows, 2 * spec.kv_size), dim=1)
        q_TNH, gate_TNH = qg_TO.reshape(len(qg_TO), spec.num_heads, -1).chunk(2, dim=2)
        return torch.cat((q_TNH.flatten(1), kv_TO), dim=1), gate_TNH.flatten(1)

    def ffn_input(self, layer: int, x_TD: Tensor, y_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows with ``y_TD``, and normalised as router, experts and dense networks read them."""
        return self._norm(x_TD, (y_TD,), self._norms[layer][1])

    def route(self, layer: int, h_TD: Tensor, keep_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``expert_ids_TK`` int64 and ``weights_TK`` float32 of a layer with experts.

        Args:
            keep_T: bool; rows where it is false go to no expert: their ids are -1.
        """
        weights = self._weights.layers[layer]
        assert weights.router_ED is not None, f"layer {layer} has no experts"
        flags = self.spec.router
        logits_TE = self.products.scores(h_TD, weights.router_ED)
        return route(
            logits_TE if weights.router_logit_bias_E is None else logits_TE + weights.router_logit_bias_E,
            top_k=self.spec.top_k,
            score=flags.score,
            order=flags.order,
            renormalise=flags.renormalise,
            correction_bias_E=weights.router_bias_E,
            groups=flags.groups,
            top_groups=flags.top_groups,
            group_score=flags.group_score,
            scale=flags.scale,
            keep_T=keep_T,
        )

    def dense_ffn(self, layer: int, h_TD: Tensor) -> Tensor:
        """Return the output ``y_TD`` of a layer without experts, to be added to the rows."""
        ffn = self._weights.layers[layer].ffn
        assert ffn is not None, f"layer {layer} has no dense network"
        return self._ffn(ffn, h_TD)

    def shared_expert(self, layer: int, h_TD: Tensor) -> Tensor | None:
        """Return the output ``y_TD`` of the expert that every row passes, gated if it has a gate; None if there is no
        such expert."""
        weights = self._weights.layers[layer]
        if weights.ffn is None:
            return None
        if weights.shared_gate_1D is None:
            return self._ffn(weights.ffn, h_TD)
        gate_T1 = self.products.each(torch.sigmoid, self.products.linear(h_TD, weights.shared_gate_1D))
        return gate_T1 * self._ffn(weights.ffn, h_TD)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Return the logits ``logits_RV``, float32, of rows after the last layer."""
        _, h_RD = self._norm(x_RD, (), self._last_norm_D)
        return self.products.linear(h_RD, self._weights.lm_head_VD).float()

    def _ffn(self, weights: FfnWeights, h_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.products.linear(h_TD, weights.gate_up_2FD).chunk(2, dim=1)
        return self.products.linear(self.products.each(F.silu, gate_TF).mul_(up_TF), weights.down_DF)

    def _norm(self, x_TD: Tensor, added: Added, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        y_TD, z_TD = [*added, None, None][:2]
        return add_rms_norm(x_TD, y_TD, weight_D, self.spec.rms_eps, z_TD=z_TD)

    def _qk_norm(self, weights: LayerWeights) -> Tensor | None:
        """Return the weights of both norms, ``[C, H]``: one per head, or parts of those of a whole projection."""
        if weights.q_norm is None or weights.k_norm is None or self.spec.qk_norm == "none":
            return None
        sizes = self.spec.num_heads, self.spec.num_kv_heads
        parts = zip((weights.q_norm, weights.k_norm), sizes, strict=True)
        norms = [norm.view(-1, self.spec.head_dim).expand(heads, -1) for norm, heads in parts]
        return self._scale(torch.cat(norms)).to(self.attention_dtype)

    def _scale(self, weight: Tensor) -> Tensor:
        """Return what a norm with ``weight`` multiplies by."""
        return (weight.float() + 1).to(weight.dtype) if self.spec.centred_norms else weight

    def _recurrence(self, weights: LayerWeights) -> Recurrence | None:
        if weights.recurrent is None or self.spec.recurrent is None:
            return None
        return Recurrence(self.spec.recurrent, weights.recurrent, self.spec.rms_eps)


def summed(x_TD: Tensor, added: Added) -> Tensor:
    """Return the rows with what was added to them."""
    return x_TD + (added[0] if len(added) == 1 else added[0] + added[1]) if added else x_TD
