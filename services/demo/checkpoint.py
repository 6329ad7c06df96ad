"""`expertmesh demo-model DIR`: writes a small qwen3_moe checkpoint in the hub's layout. No network, a few seconds."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from services.demo.corpus import docstrings
from services.demo.tokenizer import END_OF_TEXT, TURN_END, VOCAB_SIZE, tokenizer_config, train_tokenizer
from services.demo.weights import make_weights
from services.errors import ConfigError

MAX_POSITIONS = 4096
_SEED = 1234


def make_demo_model(directory: Path, dtype: str = "float32") -> None:
    """Writes the checkpoint into ``directory``, all or nothing. The same machine writes the same bytes again.

    Raises:
        ConfigError: ``directory`` holds something, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty folder.", hint="Choose another, or remove it.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"Cannot write to {directory.parent} ({error.strerror}).", hint="Choose another.") from error
    try:
        _write(unfinished, dtype)
        unfinished.chmod(0o755)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(directory: Path, dtype: str) -> None:
    texts = list(docstrings())
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    config = _model_config(tokenizer, dtype)
    weights = make_weights(config, _token_ids(tokenizer, texts), getattr(torch, dtype), seed=_SEED)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    tokenizer.save(str(directory / "tokenizer.json"))
    _dump(directory / "config.json", config)
    _dump(directory / "generation_config.json", _generation_config(tokenizer))
    _dump(directory / "tokenizer_config.json", tokenizer_config(MAX_POSITIONS))


def _token_ids(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return [token for encoding in tokenizer.encode_batch(texts) for token in (*encoding.ids, end)]


def _model_config(tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    ends = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    return {
        "do_sample": True,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "temperature": 0.8,
        "top_p": 0.95,
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
