"""Tiny random checkpoints of every family, saved by transformers in the hub's layout, and its own greedy answers.

Weights are scaled up so that logits and router scores lie far apart: float32 rounding then never decides a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 320
MAX_LEN = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_ROUTED_BY_SIGMOID = _COMMON | {
    "head_dim": 24,
    "intermediate_size": 90,
    "moe_intermediate_size": 36,
    "num_experts_per_tok": 2,
}

_WITHOUT_HEADS = {key: value for key, value in _ROUTED_BY_SIGMOID.items() if key != "head_dim"}
_LATENTS = {
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 22,
    "v_head_dim": 18,
    "n_routed_experts": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
_RECURRENT = _COMMON | {
    "head_dim": 24,
    "intermediate_size": 90,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 30,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 38,
    "linear_value_head_dim": 14,
    "layer_types": ["linear_attention", "full_attention"],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON
    | {
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2_moe": _COMMON
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "mixtral": _COMMON | {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": _COMMON | {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0},
    "glm4_moe": _ROUTED_BY_SIGMOID
    | {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "solar_open": _ROUTED_BY_SIGMOID | {"n_routed_experts": 8},
    "dots1": _ROUTED_BY_SIGMOID
    | {"n_routed_experts": 8, "n_shared_experts": 2, "sliding_window": 21, "max_window_layers": 1},
    "minimax_m2": _ROUTED_BY_SIGMOID | {"num_local_experts": 8, "intermediate_size": 36, "rotary_dim": 10},
    "exaone_moe": _ROUTED_BY_SIGMOID
    | {"num_experts": 8, "sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]},
    "hy_v3": _ROUTED_BY_SIGMOID | {"num_experts": 8, "router_scaling_factor": 1.5},
    "qwen3_next": _RECURRENT,
    "qwen3_5_moe_text": _RECURRENT,
    "ernie4_5_moe": _ROUTED_BY_SIGMOID | {"moe_num_experts": 8, "moe_k": 2},
    "gpt_oss": _COMMON
    | {
        "head_dim": 24,
        "intermediate_size": 36,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 21,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "glm4_moe_lite": _WITHOUT_HEADS | _LATENTS | {"q_lora_rank": 36, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": _WITHOUT_HEADS | _LATENTS | {"q_lora_rank": None, "n_shared_experts": 1, "num_experts_per_tok": 1},
    "deepseek_v3": _WITHOUT_HEADS
    | _LATENTS
    | {
        "q_lora_rank": 36,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


def save_checkpoint(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint of ``family`` with a byte-level tokenizer into ``folder``."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**(FAMILIES[family] | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(parameter, torch.nn.Parameter) or name.endswith("correction_bias"):
                parameter.copy_(_random_weight(name, parameter))
            if FAMILIES[family] is _RECURRENT:
                _suit_recurrent(name, parameter)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _random_weight(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if parameter.ndim == 1 or name.endswith("correction_bias"):
        return noise * 0.1 + (1.0 if "norm" in name else 0.0)
    scale = parameter.shape[-1] ** -0.5
    if "lm_head" in name:
        return noise * scale * 8
    if name.endswith(("gate.weight", "router.weight")):
        return noise * scale * 6
    return noise if "embed" in name else noise * scale


def _suit_recurrent(name: str, parameter: torch.Tensor) -> None:
    if "norm" in name and "linear_attn" not in name:
        parameter -= 1  # these norms multiply by 1 more
    if name.endswith("mlp.gate.weight"):
        parameter /= 4  # choices compare probabilities, which are as good as 0 behind a first one that is near 1


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: any text round-trips, and most characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>"]
    fillers = [f"<x{i}>" for i in range(VOCAB - len(specials) - len(alphabet))]
    vocab = {token: i for i, token in enumerate(specials + alphabet + fillers)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=MAX_LEN
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Transformers' greedy continuation of ``prompt`` and its smallest logit gap between first and second token."""

    prompt: list[int]
    tokens: list[int]
    margin: float


def transformers_model(folder: Path) -> Any:
    """The checkpoint in transformers, float32, with the plain (eager) experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@torch.inference_mode()
def greedy_answers(folder: Path, prompts: Sequence[list[int]], max_new_tokens: Sequence[int]) -> list[Answer]:
    """What transformers' own ``generate`` returns for each prompt, alone in its batch, end-of-text ignored."""
    model = transformers_model(folder)
    answers = []
    for prompt, count in zip(prompts, max_new_tokens, strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top2 = torch.cat(out.logits).topk(2, dim=-1).values
        margin = float((top2[:, 0] - top2[:, 1]).min())
        answers.append(Answer(prompt=prompt, tokens=out.sequences[0, len(prompt) :].tolist(), margin=margin))
    return answers


@torch.inference_mode()
def router_margin(folder: Path, answers: Sequence[Answer]) -> float:
    """Smallest gap, in router logits, between the last chosen and the first rejected expert, over all answers."""
    model = transformers_model(folder)
    top_k = model.config.num_experts_per_tok
    gaps: list[float] = []

    def watch(_module: Any, inputs: tuple[torch.Tensor, ...], _out: Any) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        ranked = (hidden @ _module.weight.T).topk(top_k + 1, dim=-1).values
        gaps.append(float((ranked[:, top_k - 1] - ranked[:, top_k]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert routers, "no router found: the margin would be vacuous"
    hooks = [router.register_forward_hook(watch) for router in routers]
    for answer in answers:
        model(torch.tensor([answer.prompt + answer.tokens]))
    for hook in hooks:
        hook.remove()
    return min(gaps)
