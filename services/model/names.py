"""Names and shapes of a checkpoint's tensors on disk, in the hub's layout."""

from __future__ import annotations

from dataclasses import dataclass

from services.model.recurrent_names import recurrent_shapes
from services.model.spec import ModelSpec

Shape = tuple[int, ...]

EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnNames:
    """A gated feed-forward network: ``down(silu(gate x) * (up x))``."""

    gate: str
    up: str
    down: str

    @property
    def matrices(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[str, str, str]:
        """Names of the biases, where there are some."""
        gate, up, down = (f"{name.removesuffix('.weight')}.bias" for name in self.matrices)
        return gate, up, down

    def tensors(self, *, biases: bool) -> tuple[tuple[str, str, str], ...]:
        """Return :attr:`matrices`, and :attr:`biases` if there are some."""
        return (self.matrices, self.biases) if biases else (self.matrices,)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What a family calls the parts of a layer with experts. ``bias_in_a_row``: that of the router is a matrix.
    ``together``: files have one tensor for all experts of a layer, and no tensor by an expert's name."""

    moe: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    bias_in_a_row: bool = False
    together: bool = False
    shared: str = "mlp.shared_experts"


_MIXTRAL = _Parts(
    moe="block_sparse_moe",
    expert=("w1", "w3", "w2"),
    router="block_sparse_moe.gate",
    bias="block_sparse_moe.e_score_correction_bias",
)
_FAMILIES = {
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _Parts(shared="mlp.shared_expert")),
    "ernie4_5_moe": _Parts(bias="mlp.moe_statics.e_score_correction_bias", bias_in_a_row=True),
    "exaone_moe": _Parts(bias="mlp.e_score_correction_bias"),
    "gpt_oss": _Parts(router="mlp.router", together=True),
    "hy_v3": _Parts(router="mlp.router.gate", bias="mlp.expert_bias", shared="mlp.shared_mlp"),
}
_MTP_TENSORS = {
    "ernie4_5_moe": "model.mtp_",
    **dict.fromkeys(("exaone_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), "mtp."),
}
"""With what names begin of the parts that predict tokens further ahead, where these are no layers like the others."""


class TensorNames:
    """Tensor names of a family."""

    def __init__(self, family: str) -> None:
        self._parts = _FAMILIES.get(family, _Parts())

    @property
    def like_mixtral(self) -> bool:
        """Whether files name experts as Mixtral's do, other than transformers' modules."""
        return self._parts == _MIXTRAL

    @property
    def together(self) -> bool:
        """Whether files have all experts of a layer in one tensor: see :mod:`services.model.together`."""
        return self._parts.together

    def layer(self, layer: int, part: str) -> str:
        """Return ``part`` (such as ``self_attn.q_proj.weight``) of a layer."""
        return f"model.layers.{layer}.{part}"

    def router(self, layer: int) -> str:
        return self.layer(layer, f"{self._parts.router}.weight")

    def router_logit_bias(self, layer: int) -> str:
        return self.layer(layer, f"{self._parts.router}.bias")

    def sinks(self, layer: int) -> str:
        return self.layer(layer, "self_attn.sinks")

    def router_bias(self, layer: int) -> str:
        return self.layer(layer, self._parts.bias)

    def router_bias_shape(self, experts: int) -> Shape:
        return (1, experts) if self._parts.bias_in_a_row else (experts,)

    def shared_gate(self, layer: int) -> str:
        return self.layer(layer, "mlp.shared_expert_gate.weight")

    def experts(self, layer: int) -> str:
        """Return with what the names of all experts of a layer begin."""
        return self.layer(layer, f"{self._parts.moe}.experts")

    def expert(self, layer: int, expert: int) -> FfnNames:
        return self._ffn(layer, f"{self._parts.moe}.experts.{expert}", *self._parts.expert)

    def shared_expert(self, layer: int) -> FfnNames:
        return self._ffn(layer, self._parts.shared, "gate_proj", "up_proj", "down_proj")

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
            ffn = names.expert(layer, expert)
            shapes |= _ffn_shapes(ffn, spec.hidden_size, spec.expert_ffn)
            if spec.expert_bias:
                widths = (spec.expert_ffn, spec.expert_ffn, spec.hidden_size)
                shapes |= {name: (1, width) for name, width in zip(ffn.biases, widths, strict=True)}
    return shapes


def linear_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of the weight of every linear layer, by name: what a checkpoint may have quantised."""
    shapes = dense_shapes(spec) | expert_shapes(spec)
    return {
        name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight") and name != EMBED
    }


def is_harmless(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor that no spec lists may be ignored: rotary tables, an output head that is tied, and parts
    that predict tokens further ahead."""
    return name.endswith("rotary_emb.inv_freq") or name == LM_HEAD or is_mtp(name, spec)


def is_mtp(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor or a layer belongs to the parts that predict tokens further ahead."""
    if spec.family in _MTP_TENSORS:
        return spec.mtp_layers > 0 and name.startswith(_MTP_TENSORS[spec.family])
    behind = range(spec.num_layers, spec.num_layers + spec.mtp_layers)
    return name.startswith(tuple(f"model.layers.{layer}." for layer in behind))


def _attention_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    sizes = first_projections(spec)
    width, names = spec.hidden_size, TensorNames(spec.family)
    shapes: dict[str, Shape] = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    if spec.layers[layer].recurrent:
        return {names.layer(layer, part): shape for part, shape in (shapes | recurrent_shapes(spec)).items()}
    shapes |= {f"self_attn.{part}.weight": (size, width) for part, size in sizes.items()}
    shapes["self_attn.o_proj.weight"] = (width, spec.o_size)
    shapes |= _latent_shapes(spec)
    if spec.qkv_bias:
        shapes |= {f"self_attn.{part}.bias": (size,) for part, size in sizes.items()}
    if spec.o_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        shapes["self_attn.q_norm.weight"] = (spec.head_dim if per_head else spec.q_size,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim if per_head else spec.kv_size,)
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    return {names.layer(layer, part): shape for part, shape in shapes.items()}


def first_projections(spec: ModelSpec) -> dict[str, int]:
    """Return what attention projects a layer's rows to, and the rows of each projection."""
    latent = spec.latent
    if latent is None:
        return {"q_proj": spec.q_rows, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    query = {"q_a_proj": latent.query_rank} if latent.query_rank else {"q_proj": spec.q_size}
    return query | {"kv_a_proj_with_mqa": latent.size}


def _latent_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shapes of what makes queries, keys and values of latents."""
    latent = spec.latent
    if latent is None:
        return {}
    shapes: dict[str, Shape] = {"self_attn.kv_a_layernorm.weight": (latent.rank,)}
    shapes["self_attn.kv_b_proj.weight"] = (spec.num_heads * (latent.plain + latent.value), latent.rank)
    if latent.query_rank:
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        shapes["self_attn.q_b_proj.weight"] = (spec.q_size, latent.query_rank)
    return shapes


def _ffn_part_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Return the shapes of router and shared expert of a layer with experts, or the one network of a layer without."""
    names, width = TensorNames(spec.family), spec.hidden_size
    if spec.layers[layer].kind == "dense":
        return _ffn_shapes(names.dense_ffn(layer), width, spec.dense_ffn)
    shapes: dict[str, Shape] = {names.router(layer): (spec.num_experts, width)}
    if spec.router.bias:
        shapes[names.router_bias(layer)] = names.router_bias_shape(spec.num_experts)
    if spec.router.logit_bias:
        shapes[names.router_logit_bias(layer)] = (spec.num_experts,)
    if spec.shared_ffn:
        shapes |= _ffn_shapes(names.shared_expert(layer), width, spec.shared_ffn)
    if spec.shared_ffn and spec.shared_gated:
        shapes[names.shared_gate(layer)] = (1, width)
    return shapes


def _ffn_shapes(names: FfnNames, width: int, ffn: int) -> dict[str, Shape]:
    return {names.gate: (ffn, width), names.up: (ffn, width), names.down: (width, ffn)}
