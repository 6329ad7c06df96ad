"""Where documents lie in packed rows, as the attention of every layer needs it: made once per pass.

Legend: B rows, L positions of a row, H head dimension, T = B x L tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

AttentionKind = Literal["sdpa", "varlen"]
"""sdpa: torch's attention with a mask. varlen: flash attention by document; sdpa but on CUDA in half precision."""


class Documents(NamedTuple):
    """``bias_B1LL`` keeps documents apart where rows hold several (None: each row is one). For "varlen" ``starts``
    int32 has each document's first token and then, up to its fixed length, T."""

    cos_BL1H: Tensor
    sin_BL1H: Tensor
    bias_B1LL: Tensor | None
    starts: Tensor | None


def locate(
    positions_BL: Tensor | None, like_BLD: Tensor, *, head_dim: int, theta: float, kind: AttentionKind, most: int | None
) -> Documents:
    """``positions_BL`` starts at 0 in each document; None: each row is one document.

    ``most`` bounds how many documents there are (for "varlen"; None: count them, which waits for the device).
    """
    dtype, (rows, length) = like_BLD.dtype, like_BLD.shape[:2]
    whole = positions_BL is None
    if positions_BL is None:
        positions_BL = torch.arange(length, device=like_BLD.device).expand(rows, length)
    cos_BL1H, sin_BL1H = _rotary(positions_BL, head_dim, theta, dtype)
    if kind == "varlen" and like_BLD.is_cuda and dtype != torch.float32:
        return Documents(cos_BL1H, sin_BL1H, None, _starts(positions_BL, most))
    return Documents(cos_BL1H, sin_BL1H, None if whole else _bias(positions_BL, dtype), None)


def _rotary(positions_BL: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles in float32 and their cosines rounded to ``dtype``, as transformers has it."""
    exponent_I = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BL.device) / head_dim
    angle_BLI = positions_BL.float().unsqueeze(2) * (1.0 / theta**exponent_I)
    angle_BL1H = torch.cat((angle_BLI, angle_BLI), dim=2).unsqueeze(2)
    return angle_BL1H.cos().to(dtype), angle_BL1H.sin().to(dtype)


def _bias(positions_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, of its own document and not later; else -inf. Everyone sees itself."""
    document_BL = (positions_BL == 0).cumsum(1)
    same_BLL = document_BL.unsqueeze(2) == document_BL.unsqueeze(1)
    seen_BLL = same_BLL & torch.ones_like(same_BLL[0]).tril()
    bias_BLL = torch.zeros(seen_BLL.shape, dtype=dtype, device=positions_BL.device)
    return bias_BLL.masked_fill_(~seen_BLL, float("-inf")).unsqueeze(1)


def _starts(positions_BL: Tensor, most: int | None) -> Tensor:
    """int32 ``[most + 1]``, without reading a value: the n-th document's first token goes to place n."""
    # A row begins a document even if the row before it was cut in the middle of one.
    first_BL = positions_BL == 0
    first_BL[:, 0] = True
    first_T = first_BL.flatten()
    if most is None:
        most = int(first_T.sum())
    place_T = torch.where(first_T, first_T.cumsum(0) - 1, most)
    starts = torch.full((most + 1,), len(first_T), dtype=torch.int32, device=positions_BL.device)
    token_T = torch.arange(len(first_T), dtype=torch.int32, device=positions_BL.device)
    return starts.scatter_(0, place_T, torch.where(first_T, token_T, len(first_T)))
