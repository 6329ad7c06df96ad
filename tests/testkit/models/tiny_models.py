"""Tiny architectures with every switch of every family, and the serving path driven without an engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.fabric.local import LocalLink
from services.model.dense import Added, DenseModel, summed
from services.model.experts import ExpertShard
from services.model.inputs import SequenceRows, StateRows, StepInputs
from services.model.load_spec import load_spec
from services.model.products import Products
from services.model.spec import ModelSpec
from services.model.state_cache import StateCache
from services.model.state_room import FIRST_SLOT, ZERO_SLOT
from services.model.weights import load_dense, load_experts

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": None,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 16,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE: dict[str, Any] = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 4}
GLM4: dict[str, Any] = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "n_shared_experts": 1,
    "head_dim": 24,
    "use_qk_norm": True,
    "attention_bias": True,
    "routed_scaling_factor": 2.5,
}
SOLAR: dict[str, Any] = {
    "model_type": "solar_open",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "head_dim": 24,
}
DOTS1: dict[str, Any] = {
    "model_type": "dots1",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "routed_scaling_factor": 1.5,
}
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2",
    "intermediate_size": 18,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 24,
    "rotary_dim": 10,
}
EXAONE: dict[str, Any] = {
    "model_type": "exaone_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "num_hidden_layers": 4,
    "sliding_window": 9,
}
HUNYUAN3: dict[str, Any] = {
    "model_type": "hy_v3",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "head_dim": 24,
    "router_scaling_factor": 1.5,
}
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 18,
    "moe_num_shared_experts": 2,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 18,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
DEEPSEEK3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 26,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 6,
}
DEEPSEEK2: dict[str, Any] = {key: value for key, value in DEEPSEEK3.items() if key not in ("n_group", "topk_group")} | {
    "model_type": "deepseek_v2",
    "routed_scaling_factor": 1.5,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 10,
    "head_dim": 24,
    # At the usual 1e-6 heads whose output is nearly 0 make much of its rounding, in transformers as well.
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 38,
    "linear_value_head_dim": 14,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
QWEN3_5: dict[str, Any] = {key: value for key, value in QWEN3_NEXT.items() if key != "model_type"} | {
    "model_type": "qwen3_5_moe_text"
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-renormalised": QWEN3 | {"norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen3-mixed-layers": QWEN3 | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3-window": QWEN3 | {"use_sliding_window": True, "sliding_window": 11},
    "qwen3-bias": QWEN3 | {"attention_bias": True, "rope_parameters": YARN_ROPE},
    "qwen3-one-kv-head": QWEN3 | {"num_key_value_heads": 1, "head_dim": 24, "norm_topk_prob": True},
    "qwen2": QWEN2,
    "qwen2-renormalised": QWEN2 | {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [1]},
    "qwen2-window": QWEN2
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "num_hidden_layers": 4},
    "qwen2-odd-widths": QWEN2 | {"moe_intermediate_size": 18, "shared_expert_intermediate_size": 10},
    "mixtral": MIXTRAL,
    "mixtral-window": MIXTRAL | {"sliding_window": 13, "tie_word_embeddings": True},
    "mixtral-llama3": MIXTRAL | {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4},
    "mixtral-linear": MIXTRAL | {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1000.0}},
    "olmoe": OLMOE,
    "olmoe-clipped": OLMOE | {"clip_qkv": 0.4, "norm_topk_prob": True, "attention_bias": True},
    "glm4": GLM4,
    "glm4-groups": GLM4 | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    "glm4-plain": GLM4
    | {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 2, "n_shared_experts": 2},
    "glm4-yarn": GLM4
    | {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75}, "first_k_dense_replace": 0, "n_group": 2},
    "glm4-one-kv-head": GLM4 | {"num_key_value_heads": 1, "partial_rotary_factor": 0.42, "attention_bias": False},
    "solar": SOLAR,
    "solar-groups": SOLAR | {"attention_bias": True, "n_group": 2, "topk_group": 1},
    "dots1": DOTS1,
    "dots1-window": DOTS1
    | {"sliding_window": 9, "max_window_layers": 1, "attention_bias": True, "norm_topk_prob": True, "n_group": 2},
    "minimax": MINIMAX,
    "minimax-whole": MINIMAX | {"rotary_dim": 24, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "exaone": EXAONE,
    "exaone-unrotated": EXAONE | {"layer_types": ["full_attention"] * 4},
    "exaone-mixed-layers": EXAONE
    | {
        "head_dim": 24,
        "n_group": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    },
    "hunyuan3": HUNYUAN3,
    "hunyuan3-bias": HUNYUAN3 | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "ernie": ERNIE,
    "ernie-mixed-layers": ERNIE
    | {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3, "tie_word_embeddings": False},
    "ernie-one-kv-head": ERNIE | {"head_dim": 24, "num_key_value_heads": 1, "moe_num_shared_experts": 0},
    "gpt-oss": GPT_OSS,
    "gpt-oss-unbiased": GPT_OSS | {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "gpt-oss-layers": GPT_OSS
    | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
        "hidden_size": 36,
        "sliding_window": 2,
    },
    "gpt-oss-defaults": {key: value for key, value in GPT_OSS.items() if key not in ("rope_parameters", "head_dim")},
    "deepseek3": DEEPSEEK3,
    "deepseek3-direct-queries": DEEPSEEK3
    | {"q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False, "v_head_dim": 22},
    "deepseek3-yarn": DEEPSEEK3
    | {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 1, "topk_group": 1},
    "deepseek3-halves": DEEPSEEK3
    | {"rope_interleave": False, "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    "deepseek2": DEEPSEEK2 | {"q_lora_rank": None, "num_attention_heads": 2, "num_key_value_heads": 2},
    "deepseek2-groups": DEEPSEEK2
    | {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "glm4-lite": {key: value for key, value in DEEPSEEK3.items() if key != "first_k_dense_replace"}
    | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "dense"]},
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next-mixed-layers": QWEN3_NEXT
    | {
        "num_hidden_layers": 4,
        "layer_types": None,
        "full_attention_interval": 2,
        "mlp_only_layers": [1],
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 3,
        "partial_rotary_factor": 0.75,
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3-next-yarn": QWEN3_NEXT | {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 16},
    "qwen3.5": QWEN3_5,
    "qwen3.5-one-kv-head": QWEN3_5
    | {"num_key_value_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
    "olmoe-dynamic": OLMOE | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
}


STATES = 64
"""Recurrent states of the serving path below."""


def save_model(folder: Path, config: dict[str, Any], *, shard_size: str = "1GB") -> Any:
    """A random model of the architecture in ``config``, saved in the hub's layout; returns transformers' model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(len(json.dumps(config)))
    values = {key: value for key, value in (BASE | config).items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**values)).float().eval()
    routers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *routers]:
        # Norms and biases away from 1 and 0, weights that keep the size of what passes through them.
        scale, mean = (0.3, 1.0) if "norm" in name else (parameter.shape[-1] ** -0.5, 0.0)
        if "linear_num_key_heads" in config and "linear_attn" not in name:
            mean = 0.0  # norms multiply by 1 more
        if "conv1d" in name:  # queries and keys have mostly one sign, and few are at right angles
            scale *= 4
        torch.nn.init.normal_(parameter, mean=mean, std=scale)
    model.tie_weights()
    model.set_experts_implementation("eager")
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


class PagedCache:
    """Paged keys and values; blocks of a sequence are scattered over the pool, and the rest of it is full of junk."""

    def __init__(
        self, spec: ModelSpec, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        parts, *sizes = spec.kv_shape
        self._layers = [torch.randn(parts, blocks, block_size, *sizes).to(device, dtype) for _ in spec.layers]
        self._states = StateCache(spec, slots=STATES, device=device) if spec.recurrent else None
        if self._states is not None:
            self._states.allocate()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        return keys, values

    def latents(self, layer: int) -> Tensor:
        return self._layers[layer][0].squeeze(2)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        assert self._states is not None
        return self._states.layer(layer)


@dataclass
class Run:
    """A sequence on its way through the steps."""

    token_ids: list[int]
    blocks: list[int]
    done: int = 0
    state: int = ZERO_SLOT
    logits: list[Tensor] = field(default_factory=list)


class ServingPath:
    """The serving path: dense part, local link and experts over a paged cache, without batch manager or sampler."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        block_size: int = 4,
        blocks: int = 256,
        products: Products | None = None,
        drafts: bool = False,
    ) -> None:
        self.spec = load_spec(folder, drafts=drafts)
        self.device = device
        self.model = DenseModel(self.spec, load_dense(folder, self.spec, dtype=dtype, device=device), products)
        experts = load_experts(folder, self.spec, dtype=dtype, device=device) if self.spec.moe_layers else {}
        shard = ExpertShard(
            experts,
            num_experts=self.spec.num_experts,
            products=products,
            activation=self.spec.expert_activation,
        )
        self.link = LocalLink(shard.by_layer(), num_experts=self.spec.num_experts)
        self.cache = PagedCache(self.spec, blocks=blocks, block_size=block_size, dtype=dtype, device=device)
        self._states = deque(range(FIRST_SLOT, FIRST_SLOT + STATES))
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def start(self, token_ids: Sequence[int]) -> Run:
        needed = -(-len(token_ids) // self.cache.block_size)
        return Run(list(token_ids), [self._free.pop() for _ in range(needed)])

    def step(self, pieces: Sequence[tuple[Run, int]]) -> None:
        """Run the next ``length`` tokens of each sequence together, and keep the logits of all of them."""
        rows, token_ids, positions, slots = [], [], [], []
        size = self.cache.block_size
        for sequence, length in pieces:
            end = sequence.done + length
            rows.append(
                SequenceRows(start=len(token_ids), length=length, kv_len=end, blocks=sequence.blocks[: -(-end // size)])
            )
            token_ids += sequence.token_ids[sequence.done : end]
            positions += range(sequence.done, end)
            slots += [sequence.blocks[p // size] * size + p % size for p in range(sequence.done, end)]
        inputs = StepInputs(
            token_ids_T=torch.tensor(token_ids, device=self.device),
            positions_T=torch.tensor(positions, device=self.device),
            slots_T=torch.tensor(slots, device=self.device),
            sequences=tuple(rows),
            logits_rows_R=torch.arange(len(token_ids), device=self.device),
            states=self._state_rows([run for run, _ in pieces]) if self.spec.recurrent else None,
        )
        logits_TV = self._forward(inputs).cpu()
        for row, (sequence, length) in zip(rows, pieces, strict=True):
            sequence.logits.append(logits_TV[row.start : row.start + length])
            sequence.done += length

    def _state_rows(self, runs: Sequence[Run]) -> StateRows:
        """Every sequence gets another slot in every step, the ones that it left longest ago first."""
        read = [run.state for run in runs]
        for run in runs:
            if run.state != ZERO_SLOT:
                self._states.append(run.state)
        for run in runs:
            run.state = self._states.popleft()
        written = [run.state for run in runs]
        read_S, write_S = (torch.tensor(slots, device=self.device) for slots in (read, written))
        return StateRows(read_S=read_S, write_S=write_S)

    @torch.inference_mode()
    def _forward(self, inputs: StepInputs) -> Tensor:
        model = self.model
        plan = model.plan(inputs, self.cache.block_size)
        x_TD = model.embed(inputs.token_ids_T)
        added: Added = ()
        for layer, kind in enumerate(self.spec.layers):
            x_TD, y_TD = model.attention(layer, x_TD, added, plan, self.cache)
            x_TD, h_TD = model.ffn_input(layer, x_TD, y_TD)
            if kind.kind == "dense":
                added = (model.dense_ffn(layer, h_TD),)
            else:
                handle = self.link.dispatch(layer, h_TD, *model.route(layer, h_TD))
                shared_TD = model.shared_expert(layer, h_TD)
                y_TD = self.link.combine(handle)
                added = (y_TD,) if shared_TD is None else (y_TD, shared_TD)
        return model.logits(summed(x_TD, added)[inputs.logits_rows_R])
