"""The numbers that describe a checkpoint, from its ``config.json``. Torch-free: the gateway reads them, too.

:class:`ModelSpec` is flag-driven: the layers ask what a model has (``qk_norm``, ``shared_ffn``), never which family
it is. Only ``families.py`` and ``names.py`` know families by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from services.model.dense_format import NO_LINEARS, HeldLinears
from services.model.expert_format import ALL_DENSE, HeldExperts
from services.model.quantised.quantisation import Quantisation

DType = Literal["float32", "bfloat16", "float16"]
QKNorm = Literal["none", "head", "projection"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
ExpertActivation = Literal["swiglu", "swiglu_oai"]
"""As in :mod:`moe_kernels.activations.op`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding. Each field beyond ``theta`` is used by some kinds only.

    ``attention_factor`` multiplies cos and sin (yarn); ``original_max_position`` is the length before scaling.
    The first ``dim`` dimensions of a head are rotated, the others stay as they are; 0 is all of them. Of these each is
    turned with the one half of them behind it, or, ``interleaved``, each even one with the next.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    dim: int = 0
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """The flags of :func:`moe_kernels.route` that a family fixes. ``bias``: the weights have one for the choice;
    ``logit_bias``: one that is part of the logits."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    order: Literal["score_first", "choose_first"] = "score_first"
    renormalise: bool = False
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    logit_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1.2): keys and values of all heads come of one latent.

    A position has ``rank`` numbers, normed, and ``rotated`` more, rotated, that are part of each head's key. A head
    makes of the ``rank`` numbers ``plain`` of its key, which are not rotated, and ``value`` of its value. Queries come
    of ``query_rank`` numbers, normed, or where it is 0 of the rows themselves. ``scale`` is that of the softmax,
    ``eps`` of both norms.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    scale: float
    query_rank: int = 0
    eps: float = 1e-6

    @property
    def size(self) -> int:
        """Numbers that the cache has for a position."""
        return self.rank + self.rotated


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSpec:
    """Layers of gated delta rule (Yang et al. 2024, "Gated Delta Networks"): what they keep of a sequence is a state of
    one size, however long it is.

    Each key head serves ``value_heads / key_heads`` value heads; ``key_dim`` and ``value_dim`` are those of one head.
    A short convolution goes before them, over ``conv`` tokens. ``by_head``: in the files the rows of the projections
    lie by key head, not by what they make.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    by_head: bool

    @property
    def channels(self) -> int:
        """Columns of the convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Elements of all values of a token, and of their gate."""
        return self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers that a layer keeps of a sequence: what the convolution looks back to, and a matrix for each head."""
        return (self.conv - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One decoder layer. ``window`` counts the positions a token sees, itself included; None is all of them.
    ``rotated``: queries and keys are turned by their positions. ``recurrent``: in place of attention it has the
    recurrence that the model's :class:`RecurrentSpec` describes."""

    kind: Literal["moe", "dense"]
    window: int | None = None
    rotated: bool = True
    recurrent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A supported checkpoint. Widths in elements; 0 where the model has no such part.

    ``eos_token_ids`` end a sequence unless the request says otherwise. ``fingerprint`` names config and weight files:
    it is a hash of the fields before it, so one that nobody reads (``bos_token_id``) has to stay, or workers of two
    releases would refuse one another. ``weights`` is a hash of some of the weights, which differs for fine-tunes of
    equal names and sizes: :func:`services.model.weights_sample.with_weights` fills it in. Workers that agree in both
    may serve one request one after the other; ``""`` (unknown, as in the release before) agrees with all.
    ``shared_gated``: the shared expert's output is multiplied by a gate of its own. ``mtp_layers`` more may lie behind
    the layers in the files: they predict tokens further ahead, and nobody reads them.
    ``sinks``: each query head has a logit that takes its share of attention and has no value. ``expert_bias``: both
    products of an expert have a bias.
    With ``latent`` a query has ``head_dim`` numbers, and there is one key head, the latent, of which values are a part;
    ``qkv_bias`` is then that of the projections to latents.
    ``output_gate``: attention's output is multiplied by the sigmoid of a projection, which lies behind each query head.
    ``centred_norms``: norms of rows, queries and keys multiply by 1 more than their weights.
    ``quantisation`` is how the weights lie on disk. ``experts`` and ``linears`` say how experts and other linear layers
    are held in memory, which ``with_weights`` decides, too, and adds to ``weights``; all other weights are in the
    serving dtype.
    """

    family: str
    dtype: DType
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    clip_qkv: float | None
    num_experts: int
    top_k: int
    expert_ffn: int
    dense_ffn: int
    shared_ffn: int
    router: RouterSpec
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    shared_gated: bool = True
    mtp_layers: int = 0
    sinks: bool = False
    expert_bias: bool = False
    expert_activation: ExpertActivation = "swiglu"
    latent: LatentSpec | None = None
    recurrent: RecurrentSpec | None = None
    output_gate: bool = False
    centred_norms: bool = False
    quantisation: Quantisation | None = None
    fingerprint: str = ""
    weights: str = ""
    experts: HeldExperts = ALL_DENSE
    linears: HeldLinears = NO_LINEARS

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind == "moe")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.latent.size if self.latent else self.num_kv_heads * self.head_dim

    @property
    def o_size(self) -> int:
        """What attention puts out for a row, all heads together."""
        return self.num_heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a layer keeps of a position: keys and values, or latents alone; heads; numbers of a head."""
        return (1, 1, self.latent.size) if self.latent else (2, self.num_kv_heads, self.head_dim)

    @property
    def q_rows(self) -> int:
        """Rows of the projection to queries, and to the gate of the output if there is one."""
        return self.q_size * (2 if self.output_gate else 1)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state, and neither keys nor values."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.recurrent)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of the keys and values of one token over all layers."""
        return math.prod(self.kv_shape) * (self.num_layers - len(self.recurrent_layers)) * itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence over all layers, in float32; 0 where no layer has one."""
        return 0 if self.recurrent is None else 4 * len(self.recurrent_layers) * self.recurrent.state_elements
