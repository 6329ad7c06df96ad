"""Names and shapes of a checkpoint's tensors on disk, in the hub's layout."""

from __future__ import annotations

from dataclasses import dataclass

from services.model.spec import ModelSpec

Shape = tuple[int, ...]

EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnNames:
    """A gated feed-forward network: ``down(silu(gate x) * (up x))``."""

    gate: str
    up: str
    down: str


class TensorNames:
    """Tensor names of a family. Mixtral has its own for the experts; the others agree."""

    def __init__(self, family: str) -> None:
        mixtral = family == "mixtral"
        self._moe = "block_sparse_moe" if mixtral else "mlp"
        self._gate, self._up, self._down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def layer(self, layer: int, part: str) -> str:
        """Return ``part`` (such as ``self_attn.q_proj.weight``) of a layer."""
        return f"model.layers.{layer}.{part}"

    def router(self, layer: int) -> str:
        return self.layer(layer, f"{self._moe}.gate.weight")

    def shared_gate(self, layer: int) -> str:
        return self.layer(layer, "mlp.shared_expert_gate.weight")

    def expert(self, layer: int, expert: int) -> FfnNames:
        return self._ffn(layer, f"{self._moe}.experts.{expert}", self._gate, self._up, self._down)

    def shared_expert(self, layer: int) -> FfnNames:
        return self._ffn(layer, "mlp.shared_expert", "gate_proj", "up_proj", "down_proj")

    def dense_ffn(self, layer: int) -> FfnNames:
        return self._ffn(layer, "mlp", "gate_proj", "up_proj", "down_proj")

    def _ffn(self, layer: int, prefix: str, gate: str, up: str, down: str) -> FfnNames:
        return FfnNames(
            gate=self.layer(layer, f"{prefix}.{gate}.weight"),
            up=self.layer(layer, f"{prefix}.{up}.weight"),
            down=self.layer(layer, f"{prefix}.{down}.weight"),
        )


def dense_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of every tensor that is not an expert's, by name."""
    width = spec.hidden_size
    shapes: dict[str, Shape] = {EMBED: (spec.vocab_size, width), FINAL_NORM: (width,)}
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, width)
    for layer in range(spec.num_layers):
        shapes |= _attention_shapes(spec, layer) | _ffn_part_shapes(spec, layer)
    return shapes


def expert_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shapes of every expert's tensors, by name."""
    names = TensorNames(spec.family)
    shapes: dict[str, Shape] = {}
    for layer in spec.moe_layers:
        for expert in range(spec.num_experts):
            shapes |= _ffn_shapes(names.expert(layer, expert), spec.hidden_size, spec.expert_ffn)
    return shapes


def linear_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of the weight of every linear layer, by name: what a checkpoint may have quantised."""
    shapes = dense_shapes(spec) | expert_shapes(spec)
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and name != EMBED}


def is_harmless(name: str) -> bool:
    """Return whether a tensor that no spec lists may be ignored: rotary tables, and an output head that is tied."""
    return name.endswith("rotary_emb.inv_freq") or name == LM_HEAD


def _attention_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    sizes = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    width = spec.hidden_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    shapes |= {f"self_attn.{part}.weight": (size, width) for part, size in sizes.items()}
    shapes["self_attn.o_proj.weight"] = (width, spec.q_size)
    if spec.qkv_bias:
        shapes |= {f"self_attn.{part}.bias": (size,) for part, size in sizes.items()}
    if spec.o_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        shapes["self_attn.q_norm.weight"] = (spec.head_dim if per_head else spec.q_size,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim if per_head else spec.kv_size,)
    names = TensorNames(spec.family)
    return {names.layer(layer, part): shape for part, shape in shapes.items()}


def _ffn_part_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Return the shapes of router and shared expert of a layer with experts, or the one network of a layer without."""
    names, width = TensorNames(spec.family), spec.hidden_size
    if spec.layers[layer].kind == "dense":
        return _ffn_shapes(names.dense_ffn(layer), width, spec.dense_ffn)
    shapes: dict[str, Shape] = {names.router(layer): (spec.num_experts, width)}
    if spec.shared_ffn:
        shapes |= _ffn_shapes(names.shared_expert(layer), width, spec.shared_ffn)
        shapes[names.shared_gate(layer)] = (1, width)
    return shapes


def _ffn_shapes(names: FfnNames, width: int, ffn: int) -> dict[str, Shape]:
    return {names.gate: (ffn, width), names.up: (ffn, width), names.down: (width, ffn)}
