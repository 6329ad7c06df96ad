"""Makes the demo's weights. They are not trained, but the output layer holds which token follows which in the corpus.

Embedding and output layer are the two sides of a low-rank factorisation of that table, so the text has the look of
English; the layers between are random and small, and disturb it little.
Legend: V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_SMOOTHING = 0.02
_SHARPNESS = 1.5
"""Factor on the logits, which makes up for what the factorisation and the final norm blur."""


def make_weights(
    config: dict[str, Any], token_ids: list[int], dtype: torch.dtype, *, seed: int
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a qwen3_moe checkpoint under the hub's names. The same arguments give the same bits."""
    generator = torch.Generator().manual_seed(seed)
    embed_VD, head_VD = _followers(token_ids, config["vocab_size"], config["hidden_size"], generator)
    tensors = {"model.embed_tokens.weight": embed_VD, "lm_head.weight": head_VD}
    for name, shape in _shapes(config):
        scale = config["initializer_range"] if "gate.weight" not in name else shape[-1] ** -0.5
        tensors[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * scale
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def _followers(
    token_ids: list[int], vocab_size: int, hidden_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes embedding and output layer, [V, D] each: their product is near log P(next | token) up to the row's mean."""
    ids = torch.tensor(token_ids)
    counts_VV = torch.zeros(vocab_size, vocab_size)
    counts_VV.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
    share_V = counts_VV.sum(0) / counts_VV.sum()
    follow_VV = (counts_VV + _SMOOTHING * len(ids) ** 0.5 * share_V).clamp(min=1e-4)
    table_VV = (follow_VV / follow_VV.sum(1, keepdim=True)).log()
    table_VV -= table_VV.mean(1, keepdim=True)
    basis_VD = _left_basis(table_VV, hidden_size, generator)
    embed_VD = basis_VD * vocab_size**0.5  # root mean square 1: what the final norm makes of a row
    return embed_VD, table_VV.T @ basis_VD * (_SHARPNESS / vocab_size**0.5)


def _left_basis(matrix_VV: torch.Tensor, rank: int, generator: torch.Generator) -> torch.Tensor:
    """Returns orthonormal columns near the ``rank`` leading left singular vectors (randomised subspace iteration)."""
    sketch_VD = matrix_VV @ torch.randn(matrix_VV.shape[1], rank, generator=generator)
    for _ in range(2):
        sketch_VD = matrix_VV @ (matrix_VV.T @ torch.linalg.qr(sketch_VD).Q)
    basis_VD: torch.Tensor = torch.linalg.qr(sketch_VD).Q
    return basis_VD


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every tensor but the embeddings, in the hub's order."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for projection in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp.experts.{expert}.{projection}.weight", (config["moe_intermediate_size"], hidden)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
