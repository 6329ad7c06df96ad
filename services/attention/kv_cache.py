"""The paged KV cache: one key and one value tensor per layer, or one of latents, of which all heads make keys and
values; cut into blocks that the batch manager hands out.

Legend: N blocks, B tokens per block, K key/value heads, H head dimension, Z numbers of a latent, S slots, T rows of a
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.errors import ConfigError, OutOfMemory
from services.model.spec import ModelSpec
from services.model.state_cache import StateCache

ROOM_GIB = 4.0
"""Of a GPU's free memory, what is left to activations and CUDA graphs by the advice to lower the KV cache."""


class KVCache:
    """Keys and values of ``num_blocks`` blocks, zeroed: padded lanes read unwritten slots with a weight of 0.

    One spare block takes the rows of no sequence and is never read. In addition to its keys and values a slot keeps the
    id of its token, 8 bytes, for :mod:`services.attention.sampling.histories`. Recurrent layers have ``state_slots``
    states instead, none of them zeroed.

    Raises (constructor):
        OutOfMemory: the device has no room for them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        state_slots: int = 0,
    ) -> None:
        parts, heads, size = spec.kv_shape
        self._shape = parts, num_blocks + 1, block_size, heads, size
        self._dtype, self._device = dtype, device
        attending = (index for index, layer in enumerate(spec.layers) if not layer.recurrent)
        self._number_of = {layer: number for number, layer in enumerate(attending)}
        self._states = StateCache(spec, slots=state_slots, device=device) if spec.recurrent_layers else None
        self._nbytes = num_blocks * block_bytes(spec, block_size=block_size, dtype=dtype)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.spare_slot = num_blocks * block_size
        """The slot where rows of no sequence go."""
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, zeroed. Raises OutOfMemory."""
        if self._states is not None:
            self._states.allocate()
        most = _most(self._device)
        try:
            self._layers = [torch.zeros(self._shape, dtype=self._dtype, device=self._device) for _ in self._number_of]
        except RuntimeError as error:
            raise OutOfMemory(
                f"{self.num_blocks} KV blocks take {self._nbytes / 2**30:.3g} GiB, more than the memory of "
                f"{self._device} has left.",
                hint=f"Lower --kv-memory-gib{most}.",
            ) from error
        slots = (self.num_blocks + 1) * self.block_size
        self.token_ids_S = torch.zeros(slots, dtype=torch.int64, device=self._device)
        """Token id of each slot; 0 where none was written."""

    def free(self) -> None:
        """Give the memory back, with all that it holds, until :meth:`allocate`."""
        self._layers = []
        if self._states is not None:
            self._states.free()
        self.token_ids_S = torch.empty(0, dtype=torch.int64, device=self._device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``(k_NBKH, v_NBKH)`` of one layer."""
        kv_2NBKH = self._layers[self._number_of[layer]]
        return kv_2NBKH[0], kv_2NBKH[1]

    def latents(self, layer: int) -> Tensor:
        """Return ``latents_NBZ`` of one layer, of a model whose keys and values come of latents."""
        return self._layers[self._number_of[layer]][0].squeeze(2)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the recurrent states of one layer, as :meth:`StateCache.layer` does."""
        assert self._states is not None, "the model has recurrent layers"
        return self._states.layer(layer)

    def write_tokens(self, slots_T: Tensor, token_ids_T: Tensor) -> None:
        """Put a step's tokens into their slots. Both tensors are int64."""
        self.token_ids_S.index_copy_(0, slots_T, token_ids_T)

    def move(self, from_A: Tensor, to_A: Tensor) -> None:
        """Copy slots ``from_A`` to ``to_A``, int64 on the device of the cache: all are read before any is written."""
        for kv_2NBKH in self._layers:
            kv_2SKH = kv_2NBKH.flatten(1, 2)
            kv_2SKH[:, to_A] = kv_2SKH[:, from_A]
        self.token_ids_S[to_A] = self.token_ids_S[from_A]

    def clear(self, slots_T: Tensor) -> None:
        """Zero the slots ``slots_T``, int64 on the device of the cache."""
        for kv_2NBKH in self._layers:
            kv_2NBKH.flatten(1, 2)[:, slots_T] = 0

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks``: a NaN left behind would reach the next owner, since 0 x NaN is NaN."""
        for kv_2NBKH in self._layers:
            kv_2NBKH[:, torch.tensor(blocks, dtype=torch.int64, device=kv_2NBKH.device)] = 0


def _most(device: torch.device) -> str:
    """Return what the setting may be at most, if the device says how much of its memory is free."""
    if device.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(device)
    return f" to at most {max(0, int(10 * (free / 2**30 - ROOM_GIB))) / 10:g}, or leave it out"


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one block over all layers."""
    return block_size * spec.kv_bytes(dtype.itemsize)


def blocks_within(
    memory_gib: float, spec: ModelSpec, *, block_size: int, dtype: torch.dtype, draft: ModelSpec | None = None
) -> int:
    """Return how many blocks fit into ``memory_gib``, with as many of the cache of a ``draft`` model.

    Raises:
        ConfigError: not even one does.
    """
    models = [spec] if draft is None else [spec, draft]
    each = sum(block_bytes(model, block_size=block_size, dtype=dtype) for model in models)
    both = "" if draft is None else ", with that of the draft model's cache,"
    blocks = int(memory_gib * 2**30) // each
    if blocks < 1:
        raise ConfigError(
            f"--kv-memory-gib {memory_gib} is less than one KV block, which{both} takes {each / 2**30:.3g} GiB.",
            hint="Raise it.",
        )
    return blocks
