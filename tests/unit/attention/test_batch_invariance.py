"""An engine whose products are invariant gives each request the same tokens and log-probabilities, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.gpu.decode_bench import Parts, load
from testkit.models.engines import ask, run
from testkit.queue.scores import prompt_scores

from services.attention.setup.batch_size import BatchSize
from services.attention.setup.remote_link import remote_link
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.overlap import OverlapPolicy
from services.config import Settings
from services.fabric.tcp.link import TcpLink
from services.messages import GenerateRequest, TokenEvent
from services.model.load_spec import load_spec
from services.model.products import FastestProducts, InvariantProducts, Products

CPU = torch.device("cpu")
SHARED = [5, 9, 33, 7, 21, 60, 44, 13, 2, 90, 17]
ROOMY: dict[str, Any] = {"kv_blocks": 512, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 64}
CROWDED: dict[str, Any] = {"kv_blocks": 24, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}


def _parts(tiny: Any, products: Products) -> Parts:
    return load(tiny.folder, CPU, torch.bfloat16, products)


def _requests() -> list[GenerateRequest]:
    """Mixed lengths; half of them have a common prefix, a third is sampled, and some score their prompt."""
    draw, asked = random.Random(3), []
    for number in range(18):
        own = [draw.randrange(1, 94) for _ in range(draw.choice([1, 2, 5, 9, 17, 30, 45]))]
        prompt = SHARED + own if number % 2 else own
        sampling: dict[str, Any] = {"logprobs": 3, "ignore_eos": True}
        if number % 3 == 0:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        if number % 5 == 0:
            sampling["prompt_logprobs"] = 2
        asked.append(ask(f"r{number}", prompt, draw.choice([1, 6, 20, 24]), **sampling))
    return asked


def _answer(events: list[TokenEvent]) -> list[Any]:
    """Tokens, and the scores of tokens, as what they are equal by: all their bits."""
    drawn = [(event.token_id, event.logprob) for event in events if event.token_id is not None]
    return [drawn, prompt_scores(events)]


@pytest.fixture(scope="module")
def wanted(tiny: Any) -> dict[str, list[Any]]:
    """The answer to each request where it is alone."""
    engine = _parts(tiny, InvariantProducts()).engine(None, **ROOMY, prefix_cache=False)
    return {request.id: _answer(run(engine, request)[request.id]) for request in _requests()}


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_crowd_changes_no_bit(tiny: Any, wanted: dict[str, list[Any]], overlap: Any) -> None:
    parts = _parts(tiny, InvariantProducts())
    engine = Engine(
        model=parts.model, link=parts.link(), options=EngineOptions(**CROWDED), clock=lambda: 0,
        overlap=OverlapPolicy(overlap),
    )  # fmt: skip
    found = run(engine, *_requests())
    assert {name: _answer(events) for name, events in found.items()} == wanted
    stats = engine.stats()
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.prefill_chunks) > 0
    assert (stats.overlapped_steps > 0) == (overlap == "on")


@pytest.mark.parametrize("asked", [False, True])
def test_experts_elsewhere_send_a_row_for_each_pair(tiny: Any, tmp_path: Path, asked: bool) -> None:
    """Which experts are summed where they are would change with the groups."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    settings = Settings(layout="disaggregated", fabric_secret_file=secret, batch_invariant=asked)
    size = BatchSize(max_num_seqs=4, max_num_batched_tokens=16)
    link = remote_link(settings, load_spec(tiny.folder), torch.bfloat16, CPU, "w", size=size)
    assert isinstance(link, TcpLink)
    assert link._reduced == (not asked)
    link.close()


def test_a_crowd_changes_bits_of_the_fastest_products(tiny: Any) -> None:
    """Otherwise the test above shows nothing."""
    parts = _parts(tiny, FastestProducts())
    alone = parts.engine(None, **ROOMY, prefix_cache=False)
    wanted = {request.id: _answer(run(alone, request)[request.id]) for request in _requests()}
    found = run(parts.engine(None, **CROWDED), *_requests())
    assert {name: _answer(events) for name, events in found.items()} != wanted
