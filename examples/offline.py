"""A model, its experts in this process, an engine, and tokens: the smallest program on the serving path.

    python examples/offline.py [MODEL_FOLDER] ["A prompt"]

Needs no Redis, gateway or scheduler. The folder holds a checkpoint as the hub has it; by default the small model of
examples/pocket-moe. Every name used here is one that the attention worker (services/attention/setup/build.py) uses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from services.attention.step.engine import Engine, EngineOptions
from services.fabric.local import LocalLink
from services.messages import GenerateRequest, SamplingParams
from services.model.dense import DenseModel
from services.model.experts import ExpertShard
from services.model.load_spec import load_spec
from services.model.weights import load_dense, load_experts

POCKET = Path(__file__).parent / "pocket-moe/model"


def load_engine(folder: Path, device: torch.device, dtype: torch.dtype) -> Engine[Any]:
    """The dense part, every expert, and the engine that batches requests over them."""
    spec = load_spec(folder)
    model = DenseModel(spec, load_dense(folder, spec, dtype=dtype, device=device))
    experts = ExpertShard(load_experts(folder, spec, dtype=dtype, device=device), num_experts=spec.num_experts)
    link = LocalLink(experts.by_layer(), num_experts=spec.num_experts)
    return Engine(model=model, link=link, options=EngineOptions(), clock=lambda: int(1000 * time.time()))


def generate(engine: Engine[Any], token_ids: list[int], sampling: SamplingParams) -> Iterator[int]:
    """The tokens that follow ``token_ids``, as the engine draws them."""
    deadline_ms = int(1000 * time.time()) + 600_000
    engine.add(
        GenerateRequest(
            id="one", attempt=1, token_ids=token_ids, prompt_len=len(token_ids), sampling=sampling,
            deadline_ms=deadline_ms, priority=0, tenant="", reply_to="",
        )
    )  # fmt: skip
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise SystemExit(event.error.message)
            if event.token_id is not None:
                yield event.token_id


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else POCKET
    prompt = sys.argv[2] if len(sys.argv) > 2 else "verb: run\n"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = load_engine(folder, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = list(generate(engine, tokenizer(prompt).input_ids, SamplingParams(max_tokens=32, temperature=0.0)))
    print(prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
