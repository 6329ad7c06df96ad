"""A tiny random checkpoint written by hand, so that these tests need no transformers, and engines over it."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from testkit.gpu.decode_bench import Parts, load
from testkit.models.engines import MakeEngine
from testkit.processes.roles import Deployment
from testkit.queue.client import Client
from testkit.queue.redis_server import RedisServer
from torch import Tensor

from services.attention.step.cuda_graphs import Capture
from services.attention.step.engine import Engine, EngineOptions
from services.fabric.local import LocalLink
from services.model.dense import DenseModel
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes
from services.model.reference import ReferenceModel

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
NAN, FATAL = 96, 95


@dataclass
class TinyModel:
    """Where the checkpoint lies, and its oracle."""

    folder: Path
    reference: ReferenceModel

    def load(self) -> Parts:
        return load(self.folder, torch.device("cpu"), torch.float32)

    @cached_property
    def parts(self) -> Parts:
        return self.load()

    def dense(self) -> DenseModel:
        """One of its own: a test may break its weights."""
        return self.load().model

    def link(self) -> LocalLink:
        return self.parts.link()

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What the oracle generates; it must be sure of every token and of every choice of experts."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            output = self.reference.run(tokens)
            best = output.logits_TV[-1].topk(2).values
            assert float(best[0] - best[1]) >= 1e-4
            assert float(output.router_margin_T.min()) >= 1e-4
            tokens.append(int(output.logits_TV[-1].argmax()))
            if tokens[-1] == 0:
                break
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = load_spec(folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in (dense_shapes(spec) | expert_shapes(spec)).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * values if len(shape) == 1 else 1.5 * values / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    return TinyModel(folder, ReferenceModel.load(folder))


class TouchyModel(DenseModel):
    """Cannot compute the token FATAL; NAN makes its row NaN."""

    def embed(self, token_ids_T: Tensor) -> Tensor:
        if bool((token_ids_T == FATAL).any()):
            raise RuntimeError("planted")
        return super().embed(token_ids_T)


@pytest.fixture(scope="session")
def touchy(tiny: TinyModel) -> TouchyModel:
    model = tiny.dense()
    model._weights.embed_VD[NAN] = math.nan
    return TouchyModel(model.spec, model._weights)


@pytest.fixture(scope="session")
def build_engine(tiny: TinyModel) -> MakeEngine:
    return engines_over(tiny)


def engines_over(tiny: TinyModel) -> MakeEngine:
    """Engines over the tiny model; other keyword arguments are the engine's options."""

    def build(
        *,
        model: DenseModel | None = None,
        link: Any = None,
        clock: Callable[[], int] = lambda: 0,
        overlap: Any = None,
        capture: Any = None,
        tracing: Any = None,
        **options: Any,
    ) -> Engine[Any]:
        defaults: dict[str, Any] = {"block_size": 4, "kv_blocks": 128, "max_num_batched_tokens": 64}
        return Engine(
            model=model or tiny.parts.model,
            link=link or tiny.link(),
            options=EngineOptions(**defaults | options),
            clock=clock,
            overlap=overlap,
            capture=capture,
            tracing=tracing,
        )

    return build


@pytest.fixture(params=["off", "all"], ids=["read at once", "lookahead"])
def make_engine(build_engine: MakeEngine, request: pytest.FixtureRequest) -> MakeEngine:
    """Without and with lookahead."""
    return partial(build_engine, lookahead=request.param)


@pytest.fixture
async def deployment(server: RedisServer, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """With a scheduler; its limits are the test's parameter."""
    async with Deployment(server.url, **getattr(request, "param", {})) as deployment:
        deployment.scheduler()
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> Client:
    return await deployment.client()


@pytest.fixture(scope="module")
def options_of(tiny: Any, touchy: DenseModel) -> Callable[..., dict[str, Any]]:
    """The parts of engines over the model that some tokens break."""
    link = tiny.link()

    def parts(*, capture: Capture | None = None, model: DenseModel = touchy, **options: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {"block_size": 4, "kv_blocks": 200, "max_num_batched_tokens": 64, **options}
        return {"model": model, "link": link, "capture": capture, "options": EngineOptions(**chosen)}

    return parts
