"""Packed tokens in, hidden rows, logits or losses out: the pocket models, for training and for measuring.

Parameters may be of any one dtype; the router and the losses work in float32.
Legend: B rows, L positions of a row, T = B x L tokens, D hidden size, V vocabulary, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pocket_moe.config import PocketConfig
from pocket_moe.corpus.batches import Batch
from pocket_moe.corpus.documents import AttentionKind, locate
from pocket_moe.model.layers import Block, ProductKind, Routing, SparseMlp
from pocket_moe.model.losses import (
    ChunkLoss,
    Losses,
    chunk_loss,
    cross_entropy,
    next_tokens,
    router_losses,
    token_losses,
)

Observer = Callable[[int, Tensor, Tensor], None]
"""Called by every layer with experts: its index, ``ids_TK`` int64 and ``weights_TK`` float32."""

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How, not what: each changes speed and memory, and results by rounding alone.

    ``chunk_rows``: how many rows of logits are there at once in the loss; 0 for all.
    """

    attention: AttentionKind = "sdpa"
    product: ProductKind = "sparse_mlp"
    chunk_rows: int = 8192


class PocketMoe(nn.Module):
    """A decoder in qwen3_moe's, qwen3's or llama's layout, as ``config`` says; its own output layer is the embedding.

    Documents are given by ``positions_BL``: 0 at a document's first token, 1 more at each next one. Attention does not
    cross documents. Without positions each row is one document.
    """

    def __init__(self, config: PocketConfig, *, dropout: float = 0.0, options: Options | None = None) -> None:
        super().__init__()
        self.config, self.options = config, options or Options()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(
            Block(config, dropout=dropout, kind=self.options.product) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self._chunk_loss: ChunkLoss = chunk_loss
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norms 1, matrices normal with 0.02; what adds to the residual stream less, by the count of additions."""
        residual = INIT_STD / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=residual if name.endswith(("attention.out", "w_out")) else INIT_STD)

    def forward(
        self, tokens_BL: Tensor, positions_BL: Tensor | None = None, *, observer: Observer | None = None
    ) -> Tensor:
        """Logits ``[B, L, V]`` in the parameters' dtype."""
        return self.logits(self.hidden(tokens_BL, positions_BL, observer=observer))

    def hidden(
        self, tokens_BL: Tensor, positions_BL: Tensor | None = None, *, observer: Observer | None = None
    ) -> Tensor:
        """Rows ``[B, L, D]`` after the last norm."""
        return self._run(tokens_BL, positions_BL, observer, None)[0]

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding)

    def loss(self, batch: Batch) -> Losses:
        """Of one batch; its targets are the next tokens unless it brings others."""
        x_BLD, routings = self._run(batch.tokens_BL, batch.positions_BL, None, batch.most_documents)
        targets_BL = batch.targets_BL
        if targets_BL is None:
            targets_BL = next_tokens(batch.tokens_BL, batch.positions_BL, pad_id=self.config.pad_token_id)
        weights_T = None if batch.weights_BL is None else batch.weights_BL.flatten()
        entropy = cross_entropy(
            x_BLD.flatten(0, 1),
            self.embedding,
            targets_BL.flatten(),
            weights_T,
            chunk_rows=self.options.chunk_rows,
            chunk=self._chunk_loss,
        )
        real_T = (batch.tokens_BL != self.config.pad_token_id).flatten()
        return Losses(entropy, *router_losses(routings, real_T))

    @torch.no_grad()
    def token_losses(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor | None = None,
        *,
        targets_BL: Tensor | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Nats ``[B, L]`` float32 for the token after each, 0 where there is none in the same document."""
        if targets_BL is None:
            targets_BL = next_tokens(tokens_BL, positions_BL, pad_id=self.config.pad_token_id)
        x_TD = self.hidden(tokens_BL, positions_BL, observer=observer).flatten(0, 1)
        losses_T = token_losses(x_TD, self.embedding, targets_BL.flatten(), chunk_rows=self.options.chunk_rows)
        return losses_T.view_as(tokens_BL)

    def layers(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def moe_layers(self) -> Iterator[tuple[int, SparseMlp]]:
        """The layers that have experts, with their indices."""
        for index, block in enumerate(self.layers()):
            if isinstance(block.mlp, SparseMlp):
                yield index, block.mlp

    def compile_training(self) -> None:
        """Compile what lies between the experts. They, and evaluation, stay as they are."""
        for block in self.layers():
            block.attention_in_training = torch.compile(block.attend, dynamic=False)
        self._chunk_loss = torch.compile(chunk_loss, dynamic=False)

    def _run(
        self, tokens_BL: Tensor, positions_BL: Tensor | None, observer: Observer | None, most_documents: int | None
    ) -> tuple[Tensor, list[Routing]]:
        x_BLD = F.embedding(tokens_BL, self.embedding)
        documents = locate(
            positions_BL,
            x_BLD,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            kind=self.options.attention,
            most=most_documents,
        )
        routings: list[Routing] = []
        for index, block in enumerate(self.blocks):
            x_BLD, routed = block(x_BLD, documents)
            if routed is not None:
                ids_TK, weights_TK, routing = routed
                routings.append(routing)
                if observer is not None:
                    observer(index, ids_TK, weights_TK.detach())
        return F.rms_norm(x_BLD, x_BLD.shape[-1:], self.norm, self.config.rms_norm_eps), routings
