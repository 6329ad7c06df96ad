"""Every family and every switch of it: the oracle equals transformers, and the serving path equals the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.tiny_models import (
    DEEPSEEK3,
    ERNIE,
    GLM4,
    GPT_OSS,
    MINIMAX,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    ServingPath,
    save_model,
)

from services.model.reference import ReferenceModel

EXACT = 1e-5
"""float32 against float32: as closely as transformers' own implementations of the experts agree."""
ROUNDINGS = 8
"""float16 and bfloat16: spacings of the dtype, relative to the largest logit, after three layers."""


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def test_reference_equals_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    tokens = random_tokens(70, seed=1)
    expected_TV = model(torch.tensor([tokens])).logits[0]
    logits_TV = ReferenceModel.load(folder).logits(tokens)
    assert logits_TV.abs().max() > 1, "the model must say something"
    torch.testing.assert_close(logits_TV, expected_TV, atol=EXACT, rtol=EXACT)


def serve_in_pieces(path: ServingPath, prompts: list[list[int]], generator: torch.Generator) -> list[torch.Tensor]:
    """Run all prompts side by side in random pieces, some of one token, in a random order; logits of each prompt."""
    runs = [path.start(prompt) for prompt in prompts]
    while pending := [run for run in runs if run.done < len(run.token_ids)]:
        chosen = [pending[i] for i in torch.randperm(len(pending), generator=generator).tolist()]
        lengths = [int(torch.randint(1, 18, (), generator=generator)) for _ in chosen]
        lengths = [1 if length > 12 else length for length in lengths]
        path.step([(run, min(n, len(run.token_ids) - run.done)) for run, n in zip(chosen, lengths, strict=True)])
    return [torch.cat(run.logits) for run in runs]


PROMPTS = [random_tokens(length, seed=length) for length in (1, 2, 3, 19, 33, 50, 50, 64)]


def test_serving_path_equals_reference(checkpoint: tuple[Path, Any]) -> None:
    """Several sequences flattened together, in odd pieces, over scattered blocks full of junk."""
    folder, _ = checkpoint
    reference = ReferenceModel.load(folder)
    served = serve_in_pieces(ServingPath(folder), PROMPTS, torch.Generator().manual_seed(5))
    for prompt, logits_TV in zip(PROMPTS, served, strict=True):
        torch.testing.assert_close(logits_TV, reference.logits(prompt), atol=EXACT, rtol=EXACT)


def test_whole_prompt_at_once_equals_token_by_token(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    path = ServingPath(folder, block_size=16)
    at_once, by_token = path.start(PROMPTS[-1]), path.start(PROMPTS[-1])
    path.step([(at_once, len(PROMPTS[-1]))])
    for _ in PROMPTS[-1]:
        path.step([(by_token, 1)])
    torch.testing.assert_close(torch.cat(by_token.logits), at_once.logits[0], atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "family",
    [QWEN3, QWEN2, MIXTRAL, OLMOE, GLM4, MINIMAX, ERNIE, GPT_OSS, DEEPSEEK3 | {"n_group": 1, "topk_group": 1}],
    ids=lambda family: family["model_type"],
)
def test_half_precision_serves_the_same_model(tmp_path: Path, family: dict[str, Any], dtype: torch.dtype) -> None:
    """Every expert is chosen, because rounding would choose others now and then and change a token altogether."""
    chosen = dict.fromkeys(("num_experts_per_tok", "moe_k"), 4)
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    known = {**family, "num_experts_per_tok": 0, "num_experts": 0, "num_local_experts": 0}
    save_model(tmp_path, family | {key: value for key, value in (chosen | experts).items() if key in known})
    reference = ReferenceModel.load(tmp_path)
    served = serve_in_pieces(ServingPath(tmp_path, dtype=dtype), PROMPTS, torch.Generator().manual_seed(6))
    for prompt, logits_TV in zip(PROMPTS, served, strict=True):
        expected_TV = reference.logits(prompt)
        assert logits_TV.dtype == torch.float32
        assert (logits_TV - expected_TV).abs().max() < ROUNDINGS * torch.finfo(dtype).eps * expected_TV.abs().max()


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = save_model(tmp_path, QWEN2, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (logits_TV,) = serve_in_pieces(ServingPath(tmp_path), [PROMPTS[3]], torch.Generator().manual_seed(7))
    with torch.no_grad():
        torch.testing.assert_close(logits_TV, model(torch.tensor([PROMPTS[3]])).logits[0], atol=EXACT, rtol=EXACT)


def test_router_margin_shows_how_clear_the_choice_was(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    reference = ReferenceModel.load(folder)
    margin_T = reference.run(PROMPTS[-1]).router_margin_T
    assert ((margin_T > 0) & (margin_T < 1)).all()
    # Only the past matters to a token, so its margin does not change with what follows.
    torch.testing.assert_close(reference.run(PROMPTS[-1][:10]).router_margin_T, margin_T[:10], atol=EXACT, rtol=EXACT)


def test_expert_rows_are_counted(qwen2_folder: Path) -> None:
    path = ServingPath(qwen2_folder)
    serve_in_pieces(path, PROMPTS, torch.Generator().manual_seed(8))
    tokens = sum(len(prompt) for prompt in PROMPTS)
    assert {layer: sum(rows) for layer, rows in path.link.expert_rows().items()} == dict.fromkeys(
        path.spec.moe_layers, tokens * path.spec.top_k
    )


def test_sequence_reads_only_its_own_blocks(qwen2_folder: Path) -> None:
    """Also where its group of decode rows is padded to the length of another sequence."""
    path = ServingPath(qwen2_folder)
    short, long = (path.start(prompt) for prompt in (PROMPTS[3], PROMPTS[-1]))
    path.step([(run, len(run.token_ids) - 1) for run in (short, long)])
    others = sorted(set(range(path.cache.layer(0)[0].shape[0])) - {*short.blocks, *long.blocks})
    for layer in range(path.spec.num_layers):
        for part in path.cache.layer(layer):
            part[others] = torch.nan
    path.step([(short, 1), (long, 1)])
    assert all(run.logits[-1].isfinite().all() for run in (short, long))
