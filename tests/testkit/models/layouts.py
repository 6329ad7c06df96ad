"""Equal tensors that lie differently in memory. The gaps hold what ``torch.empty`` returns: poison, in kernel tests."""

from __future__ import annotations

from torch import Tensor


def strided(tensor: Tensor) -> Tensor:
    """Equal, with gaps between all elements, which hold NaN or the largest integer."""
    spaced = tensor.new_empty([2 * size for size in tensor.shape])
    view = spaced[tuple(slice(None, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def transposed(tensor: Tensor) -> Tensor:
    """Equal, with the last dimension outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def tail(tensor: Tensor) -> Tensor:
    """Equal and contiguous, one element into its memory: not aligned to 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def rows_of_a_wider_one(tensor: Tensor) -> Tensor:
    wide = tensor.new_empty([*tensor.shape[:-1], tensor.shape[-1] + 3])
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def expanded_row(tensor: Tensor) -> Tensor:
    """Not equal: its first row over and over, with a stride of 0."""
    return tensor[:1].expand(tensor.shape)


def expanded_column(tensor: Tensor) -> Tensor:
    """Not equal: its first column over and over, with a stride of 0."""
    return tensor[..., :1].expand(tensor.shape)


LAYOUTS = [strided, transposed, tail, rows_of_a_wider_one]
EXPANDED = [expanded_row, expanded_column]
