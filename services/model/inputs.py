"""The inputs of one step, in the form in which the model takes them from the engine.

Prompt pieces and decode rows of all sequences lie in one flat row dimension without padding (ExpertFlow 4.2).
Legend: T rows of the step, R rows whose logits are wanted, N KV blocks, B tokens per block, K key/value heads,
H head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.paged_attention.trees import TreeRows
from moe_kernels.paged_attention.work import Work
from services.model.state_room import Kept


class PagedKV(Protocol):
    """The paged KV cache that :meth:`DenseModel.attention` writes to and reads from.

    Token ``p`` of a sequence lives in slot ``blocks[p // block_size] * block_size + p % block_size``. A sequence's
    whole blocks are read, slots beyond its length with weight 0, and 0 x NaN is NaN: a block handed to a sequence
    must hold finite numbers, zeros at first. Blocks of a sequence whose logits came out as NaN are zeroed before
    another one gets them.
    """

    @property
    def block_size(self) -> int: ...

    def write_tokens(self, slots_T: Tensor, token_ids_T: Tensor) -> None:
        """Keep the id of each slot's token."""
        ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(k_NBKH, v_NBKH)`` of one layer, contiguous, in the model's dtype and on its device."""
        ...

    def latents(self, layer: int) -> Tensor:
        """Return ``latents_NBZ`` of one layer likewise, of a model whose keys and values come of latents."""

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(conv_SPC, matrix_SHKV)`` of one recurrent layer, by slot, as :class:`StateCache` has them."""
        ...


class SequenceRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows ``start .. start + length`` of the step belong to one sequence.

    ``kv_len`` is the sequence's length after this step, so the rows hold the positions ``kv_len - length .. kv_len``.
    ``blocks`` are its KV blocks in order, at least ``ceil(kv_len / block_size)`` of them. ``length`` 1 is decode,
    whatever made the row. With a ``tree`` these positions are places, where keys and values lie; how far a row is
    behind the first one, and what it sees of the others, the tree says.
    """

    start: int
    length: int
    kv_len: int
    blocks: Sequence[int]
    tree: TreeRows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Sequences with one row each, as arrays: the first B rows of the step.

    ``kv_len_B`` is as in :class:`SequenceRows`. ``blocks_BM`` has each sequence's blocks, filled up with its last one.
    """

    kv_len_B: NDArray[np.int64]
    blocks_BM: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.kv_len_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRows:
    """Sequences with one row each, as int32 tensors on the model's device, which may change between two runs of a CUDA
    graph. ``kv_len_B`` 0: a row of no sequence. Only a sequence's own blocks in ``blocks_BM`` are read."""

    kv_len_B: Tensor
    blocks_BM: Tensor

    @property
    def live(self) -> Tensor:
        """Which rows are of a sequence: bool ``[B]``."""
        return self.kv_len_B > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedPieces:
    """Sequences with any number of rows each, on the model's device; all of it may change between two runs of a CUDA
    graph.

    ``blocks_SM`` int32 has the blocks of each sequence, then anything. ``work`` has a work list for each window of the
    model's layers. ``live`` bool ``[T]``: which rows are of a sequence; None: all.
    """

    blocks_SM: Tensor
    work: Mapping[int | None, Work]
    live: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """Slots of recurrent states that each sequence of the step, decodes first, starts from and ends with. A step reads
    no slot that it writes, so it can run again. With ``paged`` rows each one is a sequence."""

    read_S: Tensor
    write_S: Tensor
    kept: tuple[Kept, ...] = ()

    def part(self, first: int, end: int) -> StateRows:
        """Return those of the sequences ``first .. end``."""
        kept = (replace(one, sequence=one.sequence - first) for one in self.kept if first <= one.sequence < end)
        return StateRows(read_S=self.read_S[first:end], write_S=self.write_S[first:end], kept=tuple(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step. All tensors are int64 on the model's device; rows are in the order of ``decodes`` and ``sequences``.

    With ``paged`` there are neither ``decodes`` nor ``sequences``: it describes every row of the step. ``states`` is
    there for models with recurrent layers.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sequences: tuple[SequenceRows, ...]
    logits_rows_R: Tensor
    decodes: DecodeRows | None = None
    paged: PagedRows | PagedPieces | None = None
    states: StateRows | None = None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and ``kv_len`` of each sequence, in order."""
        decodes = [] if self.decodes is None else [(1, kv_len) for kv_len in self.decodes.kv_len_B.tolist()]
        return decodes + [(rows.length, rows.kv_len) for rows in self.sequences]
