"""With products that treat each row by itself, logits have the same bits whatever else is in a step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import CONFIGS, Run, ServingPath, save_model
from torch import Tensor

from services.model import tiled_attention
from services.model.products import FastestProducts, InvariantProducts, Products, products_of

FAMILIES = (
    "qwen3",
    "qwen2-odd-widths",
    "qwen2-window",
    "mixtral-window",
    "mixtral-llama3",
    "olmoe-clipped",
    "glm4-groups",
    "ernie",
    "exaone",
    "gpt-oss",
)
LENGTH, BLOCK = 83, 4
CHUNKS = (1, 1, 1, 2, 3, 5, 8, 16, 17, 31, 40)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, CONFIGS[request.param])
    return folder


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a prompt of this size, too, is cut into tiles that do not meet at the same time."""
    monkeypatch.setattr(tiled_attention, "PIECE", 24)


def _path(folder: Path, dtype: torch.dtype, products: Products, blocks: int = 1024) -> ServingPath:
    return ServingPath(folder, dtype=dtype, products=products, block_size=BLOCK, blocks=blocks)


def _bits(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).view(torch.int32)


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(96) for _ in range(length)]


def _neighbours(path: ServingPath, draw: random.Random) -> Iterator[list[tuple[Run, int]]]:
    """Pieces of other sequences, for a step each."""
    others: list[Run] = []
    while True:
        others += [path.start(_prompt(draw, draw.randrange(1, 30))) for _ in range(draw.choice([0, 0, 1, 4]))]
        yield [(one, draw.randrange(1, len(one.token_ids) - one.done + 1)) for one in others]
        others = [one for one in others if one.done < len(one.token_ids)][:12]


def _in_company(path: ServingPath, prompt: list[int], draw: random.Random) -> tuple[int, Tensor]:
    """The number of tokens that were cached, and the bits of the logits of the others."""
    run, neighbours = path.start(prompt), _neighbours(path, draw)
    if draw.random() < 0.5:  # a prefix that another sequence has computed
        first = path.start(prompt)
        path.step([(first, draw.randrange(1, LENGTH))])
        run.done = cached = first.done // BLOCK * BLOCK
        run.blocks[: cached // BLOCK] = first.blocks[: cached // BLOCK]
    cached = run.done
    while run.done < LENGTH:
        pieces = next(neighbours)
        pieces.insert(draw.randrange(len(pieces) + 1), (run, min(draw.choice(CHUNKS), LENGTH - run.done)))
        path.step(pieces)
    return cached, _bits(run.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_have_the_same_bits_whatever_the_batch_chunks_and_cache(folder: Path, dtype: torch.dtype) -> None:
    draw = random.Random(5)
    path, prompt = _path(folder, dtype, InvariantProducts(), blocks=8192), _prompt(draw, LENGTH)
    alone = path.start(prompt)
    path.step([(alone, LENGTH)])
    wanted = _bits(alone.logits)
    for number in range(12):
        cached, found = _in_company(path, prompt, draw)
        assert torch.equal(found, wanted[cached:]), number


@pytest.mark.parametrize(("heads", "threads"), [(10, 2), (14, 24)])
def test_threads_do_not_divide_a_tile_that_is_alone(tmp_path: Path, heads: int, threads: int) -> None:
    """Of one matrix threads divide the rows, and some of them then have other bits than among several matrices."""
    save_model(tmp_path, CONFIGS["qwen3"] | {"num_attention_heads": heads, "num_hidden_layers": 1})
    torch.set_num_threads(threads)
    path, prompt = _path(tmp_path, torch.float32, InvariantProducts()), _prompt(random.Random(5), 24)
    whole, pairs = path.start(prompt), path.start(prompt)
    path.step([(whole, len(prompt))])
    while pairs.done < len(prompt):
        path.step([(pairs, 2)])  # the rows of one tile
    assert torch.equal(_bits(pairs.logits), _bits(whole.logits))


def test_heads_of_any_width_are_filled_up(tmp_path: Path) -> None:
    """Of other widths than multiples of 8, what is added up depends on where a row lies in its tile."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 1}
    save_model(tmp_path, CONFIGS["qwen3"] | heads)
    path, prompt = _path(tmp_path, torch.float32, InvariantProducts()), _prompt(random.Random(5), LENGTH)
    whole, pieces = path.start(prompt), path.start(prompt)
    path.step([(whole, LENGTH)])
    while pieces.done < LENGTH:
        path.step([(pieces, min(3, LENGTH - pieces.done))])
    assert torch.equal(_bits(pieces.logits), _bits(whole.logits))


def test_the_fastest_products_do_depend_on_the_batch(tmp_path: Path) -> None:
    """Otherwise the test above shows nothing."""
    save_model(tmp_path, CONFIGS["qwen3"])
    draw = random.Random(5)
    path, prompt = _path(tmp_path, torch.bfloat16, FastestProducts()), _prompt(draw, LENGTH)
    alone = path.start(prompt)
    path.step([(alone, LENGTH)])
    cached, found = _in_company(path, prompt, draw)
    assert not torch.equal(found, _bits(alone.logits)[cached:])


def test_they_compute_what_the_fastest_do(folder: Path) -> None:
    draw = random.Random(7)
    prompt, logits = _prompt(draw, LENGTH), []
    for products in (FastestProducts(), InvariantProducts()):
        path = _path(folder, torch.float32, products)
        run = path.start(prompt)
        for length in (40, 1, 1, LENGTH - 42):
            path.step([(run, length)])
        logits.append(torch.cat(run.logits))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_the_setting_chooses() -> None:
    chosen: list[Any] = [type(products_of(batch_invariant=asked)) for asked in (False, True)]
    assert chosen == [FastestProducts, InvariantProducts]


def test_what_follows_a_sequences_blocks_may_be_anything(tmp_path: Path) -> None:
    """Of another, a value that is not a number would reach this one by way of a weight of 0."""
    save_model(tmp_path, CONFIGS["qwen3"])
    path = _path(tmp_path, torch.float32, InvariantProducts())
    short, long = path.start([1, 2, 3]), path.start([4] * 30)
    path.step([(short, 2), (long, 29)])
    for cache in (part for layer in range(len(path.spec.layers)) for part in path.cache.layer(layer)):
        held = {*short.blocks, *long.blocks}
        cache[[block for block in range(len(cache)) if block not in held]] = torch.nan
    path.step([(short, 1), (long, 1)])
    assert bool(short.logits[-1].isfinite().all())
    assert bool(long.logits[-1].isfinite().all())
