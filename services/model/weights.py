"""Loads the dense part of a checkpoint, or some of its experts. Each role reads only its own part.

First all tensors are made, fused, stacked and in the serving dtype, then the files are read straight into them, so the
peak is the weights themselves and some buffers. Legend: V vocabulary, D hidden size, O rows of the fused projection, F
width of a feed-forward network, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels import QuantisedWeight, Weight
from services.model.expert_biases import place_biases
from services.model.expert_format import Kind
from services.model.experts import ExpertWeights
from services.model.held_linears import Linear, head, latent_queries, network, output, qkv
from services.model.host_memory import empty
from services.model.names import EMBED, FINAL_NORM, FfnNames, TensorNames, dense_shapes, first_projections
from services.model.progress import NoProgress, Progress
from services.model.quantised_experts import QuantisedLoader, empty_weight
from services.model.quantised_linears import Held, load_linears
from services.model.recurrent import RecurrentWeights
from services.model.recurrent_names import A_LOG, CONV, DT_BIAS, NORM
from services.model.spec import ModelSpec
from services.model.tensor_reads import Place
from services.model.weight_source import FromCheckpoint, Tensors, WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnWeights:
    """Weights of ``down(silu(gate x) * (up x))``, with the gate's rows above the up projection's."""

    gate_up_2FD: Weight
    down_DF: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The dense part of one layer. ``qkv`` holds the query heads, then the key heads, then the value heads; of a layer
    that is ``recurrent`` it holds all projections of its input, and ``o_DO`` that of its output.

    With latents ``qkv`` holds what projects to the latent of queries, or to queries, then to that of keys and values;
    both have a norm, ``q_norm`` and ``k_norm``. ``q_b`` makes queries, and ``kv_b`` for each head the part of a key
    that is not rotated, then the value.

    A weight that is held quantised is one of a single expert. ``ffn`` is the layer's only network or its shared expert,
    which has a gate or none. The router gives float32, for bfloat16 logits tie: its weights are float32, or on a GPU of
    the serving dtype if they are stored in it. Sinks and the router's biases are float32.
    """

    attention_norm_D: Tensor
    qkv_OD: Weight
    qkv_bias_O: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_DO: Weight
    o_bias_D: Tensor | None
    ffn_norm_D: Tensor
    ffn: FfnWeights | None
    shared_gate_1D: Tensor | None
    router_ED: Tensor | None
    router_bias_E: Tensor | None = None
    router_logit_bias_E: Tensor | None = None
    sinks_N: Tensor | None = None
    q_b_OL: Weight | None = None
    kv_b_OC: Tensor | None = None
    recurrent: RecurrentWeights | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """All weights but the experts'. With tied embeddings ``lm_head_VD`` is ``embed_VD``."""

    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    lm_head_VD: Weight


def load_dense(
    model_dir: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    source: WeightSource | None = None,
) -> DenseWeights:
    """Return the dense part, on ``device``, held as ``spec.linears`` says: what is dense in ``dtype``. ``source``: by
    default the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or not that of ``spec``.
    """
    with (source or FromCheckpoint()).open(model_dir, spec, device) as tensors:
        reader = _Reader(tensors, spec, dtype, device, progress or NoProgress())
        reader.progress.begin("dense weights", tensors.nbytes(dense_shapes(spec)))
        embed_VD = reader.tensor(EMBED)
        weights = DenseWeights(
            embed_VD=embed_VD,
            layers=tuple(_dense_layer(reader, spec, layer) for layer in range(spec.num_layers)),
            norm_D=reader.tensor(FINAL_NORM),
            lm_head_VD=embed_VD if spec.tie_embeddings else reader.linear(head(spec)),
        )
        reader.read()
        return weights


def load_experts(
    model_dir: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    experts: Mapping[int, Sequence[int]] | None = None,
    progress: Progress | None = None,
    source: WeightSource | None = None,
) -> dict[int, ExpertWeights]:
    """Return the experts by layer, on ``device``, held as ``spec.experts`` says: those that are dense in ``dtype``.

    Args:
        experts: layer -> ids of the experts to load, in the order in which they are stacked; None: all experts.
        source: by default the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or not that of ``spec``.
    """
    wanted = experts if experts is not None else {layer: range(spec.num_experts) for layer in spec.moe_layers}
    names = TensorNames(spec.family)
    ffns = {layer: [names.expert(layer, expert) for expert in ids] for layer, ids in wanted.items()}
    with (source or FromCheckpoint()).open(model_dir, spec, device) as tensors:
        reader = _Reader(tensors, spec, dtype, device, progress or NoProgress())
        every_ffn = (ffn for layer in ffns.values() for ffn in layer)
        every_name = (name for ffn in every_ffn for part in ffn.tensors(biases=spec.expert_bias) for name in part)
        reader.progress.begin("expert weights", tensors.nbytes(every_name))
        experts_of = {
            layer: _expert_layer(reader, spec, tuple(wanted[layer]), ffns[layer])
            for layer in wanted
            if spec.experts.of(layer) is None
        }
        biases = {layer: place_biases(spec, ffns[layer], reader.empty, reader.into) for layer in wanted}
        reader.read()
        held = _quantised_layers(spec, wanted, device)

        def write(tensors: Tensors, advance: Callable[[int], None]) -> None:
            loader = QuantisedLoader(
                tensors,
                hidden=spec.hidden_size,
                width=spec.expert_ffn,
                dtype=dtype,
                device=device,
                advance=advance,
            )
            for layer, (kind, w_in, w_down) in held.items():
                loader.load(kind, w_in, w_down, ffns[layer])

        tensors.make([weight for _, *pair in held.values() for weight in pair], write, reader.progress.advance)
        experts_of |= {
            layer: ExpertWeights(expert_ids=tuple(wanted[layer]), w_gate_up_E2FD=w_in, w_down_EDF=w_down)
            for layer, (_, w_in, w_down) in held.items()
        }
        return {layer: biases[layer].of(experts_of[layer]) for layer in wanted}


def _quantised_layers(
    spec: ModelSpec, wanted: Mapping[int, Sequence[int]], device: torch.device
) -> dict[int, tuple[Kind, QuantisedWeight, QuantisedWeight]]:
    """Return, for each layer whose experts are held quantised, how they are, and room for them."""
    hidden, width = spec.hidden_size, spec.expert_ffn
    return {
        layer: (
            kind,
            empty_weight(kind, (len(ids), 2 * width, hidden), device),
            empty_weight(kind.folded, (len(ids), hidden, width), device),
        )
        for layer, ids in wanted.items()
        if (kind := spec.experts.of(layer)) is not None
    }


class _Reader:
    """Makes tensors, notes what belongs into them, and reads all of it at the end; ``progress`` gets the bytes."""

    def __init__(
        self, tensors: Tensors, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self.progress = progress
        self._kinds = dict(spec.linears.kinds)
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        self._places: list[Place] = []
        self._held: list[Held] = []

    def empty(self, *shape: int) -> Tensor:
        return empty(shape, self._dtype, self._device)

    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        shape = self._tensors.shape(name)
        return self.into(empty(shape, dtype or self._dtype, self._device), name)

    def router(self, name: str) -> Tensor:
        """Return a router's weights, not rounded: only GPUs multiply other numbers than float32 into float32."""
        narrow = self._device.type == "cuda" and self._tensors.stored_in(name, self._dtype)
        return self.tensor(name, dtype=self._dtype if narrow else torch.float32)

    def router_bias(self, name: str) -> Tensor:
        """Return a router's bias, not rounded: choices compare by its last bits."""
        return self.exact(name).flatten()

    def exact(self, name: str) -> Tensor:
        return self.tensor(name, dtype=torch.float32)

    def into(self, target: Tensor, name: str) -> Tensor:
        """Have :meth:`read` fill ``target`` with the tensor called ``name``. Returns it."""
        self._places.append(Place(name=name, target=target))
        return target

    def read(self) -> None:
        """Fill all tensors that were made."""
        self._tensors.fill(self._places, self._device, self.progress.advance)
        if self._held:
            write = partial(load_linears, self._held, self._dtype)
            self._tensors.make([weight for _, weight in self._held], write, self.progress.advance)

    def stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """Read tensors of ``rows`` rows each into one, one below the other."""
        fused = self.empty(sum(rows), *columns)
        for name, part in zip(names, fused.split_with_sizes(list(rows)), strict=True):
            self.into(part, name)
        return fused

    def linear(self, linear: Linear) -> Weight:
        kind = self._kinds.get(linear.name)
        if kind is None:
            return self.stacked(linear.names, linear.rows, linear.columns)
        weight = empty_weight(kind, (1, sum(linear.rows), linear.columns), self._device)
        self._held.append((linear, weight))
        return weight

    def ffn(self, spec: ModelSpec, names: FfnNames, width: int) -> FfnWeights:
        gate_up, down = network(spec, names, width)
        return FfnWeights(gate_up_2FD=self.linear(gate_up), down_DF=self.linear(down))


def _dense_layer(reader: _Reader, spec: ModelSpec, layer: int) -> LayerWeights:
    names = TensorNames(spec.family)

    def name(part: str) -> str:
        return names.layer(layer, part)

    sizes = first_projections(spec)
    recurrent = spec.layers[layer].recurrent
    has_experts = spec.layers[layer].kind == "moe"
    shared = has_experts and spec.shared_ffn > 0
    ffn: FfnWeights | None = None
    if not has_experts:
        ffn = reader.ffn(spec, names.dense_ffn(layer), spec.dense_ffn)
    elif shared:
        ffn = reader.ffn(spec, names.shared_expert(layer), spec.shared_ffn)
    biases = [name(f"self_attn.{part}.bias") for part in sizes]
    q_norm, k_norm = (name(f"self_attn.{norm}.weight") if norm else "" for norm in _norms(spec))
    queries = latent_queries(spec, layer)
    return LayerWeights(
        attention_norm_D=reader.tensor(name("input_layernorm.weight")),
        qkv_OD=reader.linear(qkv(spec, layer)),
        qkv_bias_O=reader.stacked(biases, [*sizes.values()]) if spec.qkv_bias and not recurrent else None,
        q_norm=reader.tensor(q_norm) if q_norm and not recurrent else None,
        k_norm=reader.tensor(k_norm) if k_norm and not recurrent else None,
        o_DO=reader.linear(output(spec, layer)),
        o_bias_D=reader.tensor(name("self_attn.o_proj.bias")) if spec.o_bias and not recurrent else None,
        ffn_norm_D=reader.tensor(name("post_attention_layernorm.weight")),
        ffn=ffn,
        shared_gate_1D=reader.tensor(names.shared_gate(layer)) if shared and spec.shared_gated else None,
        router_ED=reader.router(names.router(layer)) if has_experts else None,
        router_bias_E=reader.router_bias(names.router_bias(layer)) if has_experts and spec.router.bias else None,
        router_logit_bias_E=reader.exact(names.router_logit_bias(layer))
        if has_experts and spec.router.logit_bias
        else None,
        sinks_N=reader.exact(names.sinks(layer)) if spec.sinks else None,
        q_b_OL=reader.linear(queries) if queries else None,
        kv_b_OC=reader.tensor(name("self_attn.kv_b_proj.weight")) if spec.latent else None,
        recurrent=_recurrent(reader, name) if recurrent else None,
    )


def _recurrent(reader: _Reader, name: Callable[[str], str]) -> RecurrentWeights:
    return RecurrentWeights(
        conv_C1W=reader.tensor(name(CONV)),
        dt_bias_H=reader.tensor(name(DT_BIAS), dtype=torch.float32),
        a_log_H=reader.tensor(name(A_LOG), dtype=torch.float32),
        norm_V=reader.tensor(name(NORM)),
    )


def _norms(spec: ModelSpec) -> tuple[str, str]:
    """Return what norms of queries and keys are called, or of their latents; "" where there is none."""
    if spec.latent is not None:
        return "q_a_layernorm" if spec.latent.query_rank else "", "kv_a_layernorm"
    return ("q_norm", "k_norm") if spec.qk_norm != "none" else ("", "")


def _expert_layer(
    reader: _Reader, spec: ModelSpec, expert_ids: tuple[int, ...], ffns: Sequence[FfnNames]
) -> ExpertWeights:
    count, width, ffn = len(expert_ids), spec.hidden_size, spec.expert_ffn
    w_gate_up_E2FD, w_down_EDF = reader.empty(count, 2 * ffn, width), reader.empty(count, width, ffn)
    for slot, names in enumerate(ffns):
        reader.into(w_gate_up_E2FD[slot, :ffn], names.gate)
        reader.into(w_gate_up_E2FD[slot, ffn:], names.up)
        reader.into(w_down_EDF[slot], names.down)
    return ExpertWeights(expert_ids=expert_ids, w_gate_up_E2FD=w_gate_up_E2FD, w_down_EDF=w_down_EDF)
