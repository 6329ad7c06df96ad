"""What a pocket model is, in numbers: the fields of transformers' ``config.json``, under the same names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from pocket_moe.errors import PocketError

ModelType = Literal["qwen3_moe", "qwen3", "llama"]
ARCHITECTURES: Final[dict[ModelType, str]] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketConfig:
    """A decoder with tied embeddings. The experts' fields are 0 without experts, ``intermediate_size`` is 0 with them.

    ``qwen3_moe`` and ``qwen3`` normalise queries and keys by head; ``llama`` does not.
    """

    model_type: ModelType = "qwen3_moe"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    intermediate_size: int = 0
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    eos_token_id: int = 0
    pad_token_id: int = 3

    def __post_init__(self) -> None:
        if self.model_type not in get_args(ModelType):
            raise _misfit(f'model_type "{self.model_type}" is not one of {", ".join(get_args(ModelType))}')
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise _misfit(f"{self.num_attention_heads} heads do not share {self.num_key_value_heads} keys evenly")
        if self.head_dim % 2:
            raise _misfit(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        if self.sparse and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise _misfit(f"{self.num_experts_per_tok} of {self.num_experts} experts cannot be chosen")
        if min(self.vocab_size, self.hidden_size, self.num_hidden_layers, self.width) < 1:
            raise _misfit("every size must be at least 1")

    @property
    def sparse(self) -> bool:
        return self.model_type == "qwen3_moe"

    @property
    def qk_norm(self) -> bool:
        return self.model_type != "llama"

    @property
    def width(self) -> int:
        """F, of one expert or of the dense network."""
        return self.moe_intermediate_size if self.sparse else self.intermediate_size

    def parameters(self) -> int:
        """How many there are; the output layer is the embedding and counts once."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * self.head_dim * heads + (2 * self.head_dim if self.qk_norm else 0)
        experts = self.num_experts if self.sparse else 1
        router = self.hidden_size * self.num_experts if self.sparse else 0
        layer = attention + 3 * experts * self.hidden_size * self.width + router + 2 * self.hidden_size
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size + self.hidden_size

    def to_json(self, dtype: str) -> dict[str, Any]:
        """``config.json`` as transformers reads it; ``dtype`` is the weights' on disk."""
        fields = dataclasses.asdict(self)
        if self.sparse:
            # transformers wants the key, though no layer is dense.
            fields |= {
                "intermediate_size": self.num_experts_per_tok * self.width,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        else:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
                del fields[name]
        return fields | {
            "architectures": [ARCHITECTURES[self.model_type]],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": dtype,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "use_cache": True,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The reverse of :meth:`to_json`; other keys are passed over.

        Raises:
            PocketError: a key is missing, or the values contradict one another.
        """
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
        if fields.get("model_type") == "qwen3_moe":
            fields["intermediate_size"] = 0
        try:
            return cls(**fields)
        except TypeError as error:
            raise _misfit(f"config.json is incomplete: {error}") from error


def _misfit(problem: str) -> PocketError:
    return PocketError(f"The model's configuration does not fit together: {problem}.", hint="Correct the field.")


POCKET: Final = PocketConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
)
"""The model in the box: 10.97M parameters, 21.9 MB in bfloat16."""


def tiny(model_type: ModelType = "qwen3_moe", **changes: Any) -> PocketConfig:
    """For tests and smoke runs: thousands of parameters."""
    sizes: dict[str, Any] = {"intermediate_size": 32}
    if model_type == "qwen3_moe":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = PocketConfig(
        model_type=model_type,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        **sizes,
    )
    return dataclasses.replace(config, **changes)
