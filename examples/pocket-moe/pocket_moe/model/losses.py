"""Hidden rows in, the losses of training out: next-token cross entropy in chunks, and what keeps routers balanced.

Legend: B rows, L positions, T = B x L tokens, D hidden size, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pocket_moe.model.layers import Routing

NO_TARGET: Final = -100
ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Losses(NamedTuple):
    """Scalars on the device, with gradients. In nats per token; ``balance`` is 1 where experts share evenly;
    ``peak`` (no gradient) is the largest expert's share of tokens over the mean, averaged over layers."""

    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    peak: Tensor


def next_tokens(tokens_BL: Tensor, positions_BL: Tensor | None, *, pad_id: int) -> Tensor:
    """Targets ``[B, L]``: the next token where it belongs to the same document, else -100 (as where it is padding).

    Example: tokens ``[[5, 6, 0, 7, 0]]`` at positions ``[[0, 1, 2, 0, 1]]``: ``[[6, 0, -100, 0, -100]]``.
    """
    targets_BL = torch.full_like(tokens_BL, NO_TARGET)
    next_BL = tokens_BL[:, 1:]
    real_BL = next_BL != pad_id
    if positions_BL is not None:
        real_BL = real_BL & (positions_BL[:, 1:] != 0)
    targets_BL[:, :-1] = torch.where(real_BL, next_BL, NO_TARGET)
    return targets_BL


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, share_C: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's share of the loss, and its gradient: share x (softmax - one-hot)."""
    exact_CV = logits_CV.float()
    norm_C1 = exact_CV.logsumexp(1, keepdim=True)
    target_C1 = targets_C.clamp_min(0).unsqueeze(1)
    loss = ((norm_C1 - exact_CV.gather(1, target_C1)).squeeze(1) * share_C).sum()
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C1
    gradient_CV = ((exact_CV - norm_C1).exp() - hit_CV.float()) * share_C.unsqueeze(1)
    return loss, gradient_CV.to(logits_CV.dtype)


def cross_entropy(
    h_TD: Tensor,
    w_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None,
    *,
    chunk_rows: int,
    chunk: ChunkLoss = chunk_loss,
) -> Tensor:
    """Mean over the tokens that have a target, weighed by ``weights_T``. ``chunk_rows`` 0: all logits at once.

    ``chunk`` is :func:`chunk_loss` or its compiled form.
    """
    share_T = (targets_T != NO_TARGET).float()
    if weights_T is not None:
        share_T = share_T * weights_T
    share_T = share_T / share_T.sum().clamp_min(1e-9)
    if not chunk_rows:
        losses_T = F.cross_entropy(F.linear(h_TD, w_VD).float(), targets_T, reduction="none", ignore_index=NO_TARGET)
        return (losses_T * share_T).sum()
    loss: Tensor = _ChunkedCrossEntropy.apply(h_TD, w_VD, targets_T, share_T, chunk_rows, chunk)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_losses(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, *, chunk_rows: int) -> Tensor:
    """Nats per token in float32, 0 where there is no target."""
    size = chunk_rows or len(h_TD)
    chunks = [slice(first, first + size) for first in range(0, len(h_TD), size)]
    logits = (F.linear(h_TD[rows], w_VD).float() for rows in chunks)
    return torch.cat(
        [
            F.cross_entropy(logits_CV, targets_T[rows], reduction="none", ignore_index=NO_TARGET)
            for rows, logits_CV in zip(chunks, logits, strict=True)
        ]
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes each chunk's gradient while its logits are there, so that no more than one chunk of them ever is."""

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        w_VD: Tensor,
        targets_T: Tensor,
        share_T: Tensor,
        chunk_rows: int,
        chunk: ChunkLoss,
    ) -> Tensor:
        loss = torch.zeros((), device=h_TD.device)
        dh_TD, dw_VD = torch.empty_like(h_TD), torch.zeros_like(w_VD, dtype=torch.float32)
        for first in range(0, len(h_TD), chunk_rows):
            rows = slice(first, first + chunk_rows)
            part, dlogits_CV = chunk(F.linear(h_TD[rows], w_VD), targets_T[rows], share_T[rows])
            loss = loss + part
            torch.mm(dlogits_CV, w_VD, out=dh_TD[rows])
            dw_VD += torch.mm(dlogits_CV.t(), h_TD[rows])
        ctx.save_for_backward(dh_TD, dw_VD.to(w_VD.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dw_VD = ctx.saved_tensors
        return dh_TD * dloss.to(dh_TD.dtype), dw_VD * dloss.to(dw_VD.dtype), None, None, None, None


def router_losses(routings: Sequence[Routing], real_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Balance, z and peak, each a mean over layers (zeros without experts), of the tokens where bool ``real_T`` is
    true: padding is routed too, but says nothing.

    Balance is Switch Transformer's equation 4, E x sum over e of (share of pairs x mean probability), by layer: were
    layers taken together, one could use an expert alone that another never uses. z is ST-MoE's equation 5.
    """
    if not routings:
        zero = torch.zeros((), device=real_T.device)
        return zero, zero, zero
    balance, z, peak = zip(*(_router_loss(routing, real_T) for routing in routings), strict=True)
    return torch.stack(balance).mean(), torch.stack(z).mean(), torch.stack(peak).mean()


def _router_loss(routing: Routing, real_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    plan, tokens = routing.plan, real_T.sum().clamp_min(1)
    # Real pairs up to each place of the plan's order; an expert has those between its ends.
    counted_S = F.pad(real_T[plan.order_S // plan.slots].cumsum(0), (1, 0))
    share_E = counted_S[F.pad(plan.ends_E, (1, 0))].diff().float() / (tokens * plan.slots)
    weights_T = real_T / tokens
    probability_E = weights_T @ torch.softmax(routing.logits_TE, dim=1)
    experts = len(share_E)
    z = weights_T @ routing.logits_TE.logsumexp(1).square()
    return experts * (share_E * probability_E).sum(), z, experts * share_E.max()
