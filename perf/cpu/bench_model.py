"""Checkpoints for benchmarks: of any depth, with random weights and the demo model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from services.demo.tokenizer import VOCAB_SIZE


def shape(layers: int) -> dict[str, Any]:
    """What the benchmark's checkpoint changes in the demo model's config: wider, with two of 16 experts per token."""
    return {
        "hidden_size": 384,
        "moe_intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts_per_tok": 2,
    }


def write_checkpoint(cache: Path, layers: int) -> Path:
    """A checkpoint of ``layers`` layers with the demo model's tokenizer, made where ``cache`` has none yet."""
    import torch
    from safetensors.torch import save_file

    from services.demo.checkpoint import make_demo_model
    from services.demo.weights import make_weights

    folder, demo = cache / f"layers-{layers}", cache / "demo"
    if (folder / "model.safetensors").exists():
        return folder
    if not demo.exists():
        make_demo_model(demo)
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((demo / "config.json").read_text()) | shape(layers)
    (folder / "config.json").write_text(json.dumps(config))
    text = torch.randint(0, VOCAB_SIZE, (100_000,), generator=torch.Generator().manual_seed(0)).tolist()
    save_file(make_weights(config, text, torch.float32, seed=0), folder / "unfinished")
    (folder / "unfinished").rename(folder / "model.safetensors")
    return folder
