"""Weights that give their memory back while a model sleeps. The tensors, and views of them, stay the same objects.

Kept weights of a GPU go to the host's memory, and come back by one copy; those of a host stay where they are. Weights
that are not kept are dropped and read again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels import QuantisedWeight
from services.config import DenseFormat, ExpertFormat
from services.errors import CheckpointError
from services.model.expert_format import Kind
from services.model.host_memory import give_back, release_pinned
from services.model.names import Shape
from services.model.spec import ModelSpec
from services.model.tensor_reads import Place
from services.model.weight_source import Tensors, WeightSource, Write

PIECE_BYTES = 64 << 20
"""Pinned memory comes in powers of two: whole pieces of that size waste none."""


class WeightMemory:
    """Memory of weights. ``tensors`` may be views of one another."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = ((tensor.untyped_storage(), tensor.device) for tensor in tensors if tensor.numel())
        storages = {storage.data_ptr(): (storage, device) for storage, device in found}
        self._memories = [_Memory(*each) for each in storages.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights while they are there."""
        return sum(memory.nbytes for memory in self._memories)

    def free(self, *, keep: bool) -> None:
        """Give the device's memory back. ``keep``: into the host's memory; not again after a call without it."""
        for memory in self._memories:
            memory.free(keep=keep)
        _empty_caches(self._devices)

    def restore(self) -> None:
        """Take the memory again, with what was kept in it. What was not kept has to be filled.

        Raises:
            torch.OutOfMemoryError: there is not so much memory.
        """
        for memory in self._memories:
            memory.restore()
        for device in self._devices:
            torch.cuda.synchronize(device)
        for memory in self._memories:
            memory.kept = ()
        _empty_caches(self._devices)

    @property
    def _devices(self) -> set[torch.device]:
        return {memory.device for memory in self._memories if memory.device.type == "cuda"}


class _Memory:
    """One storage."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._storage, self.device, self.nbytes = storage, device, storage.nbytes()
        self.kept: Sequence[Tensor] = ()

    def free(self, *, keep: bool) -> None:
        on_gpu = self.device.type == "cuda"
        if keep and on_gpu and self._storage.nbytes():
            self.kept = [_on_host(piece) for piece in self._pieces()]
            torch.cuda.synchronize(self.device)
        if not keep:
            self.kept = ()
        if on_gpu or not keep:
            give_back(self._storage)

    def restore(self) -> None:
        if self._storage.nbytes() < self.nbytes:
            self._storage.resize_(self.nbytes)
        if self.kept:
            with torch.inference_mode():
                for piece, kept in zip(self._pieces(), self.kept, strict=True):
                    piece.copy_(kept, non_blocking=True)

    def _pieces(self) -> Sequence[Tensor]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)
        return [whole[begin : begin + PIECE_BYTES] for begin in range(0, len(whole), PIECE_BYTES)]


def _on_host(piece: Tensor) -> Tensor:
    try:
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    except RuntimeError:  # as much as this process may pin is pinned: the copy takes longer
        host = torch.empty(piece.shape, dtype=piece.dtype)
    return host.copy_(piece, non_blocking=True)


def _empty_caches(devices: Iterable[torch.device]) -> None:
    """Give the memory of dropped tensors, on GPUs and pinned, back to the system."""
    for device in devices:
        with torch.cuda.device(device):
            getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()  # torch shows it under no other name
            release_pinned()
            torch.cuda.empty_cache()


def collect_garbage() -> None:
    """Give the memory of all that nobody refers to any more back to the system."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _empty_caches([torch.device("cuda", torch.cuda.current_device())])


def tensors_in(weights: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dataclasses, mappings and sequences."""
    if isinstance(weights, Tensor):
        yield weights
    elif is_dataclass(weights):
        for each in fields(weights):
            yield from tensors_in(getattr(weights, each.name))
    elif isinstance(weights, Mapping):
        for value in weights.values():
            yield from tensors_in(value)
    elif isinstance(weights, list | tuple):
        for value in weights:
            yield from tensors_in(value)


def check_same(before: ModelSpec, now: ModelSpec, folder: Path) -> None:
    """Raises CheckpointError where ``now`` is another model than ``before``, or has other weights."""
    if (before.fingerprint, before.weights) != (now.fingerprint, now.weights):
        raise CheckpointError(
            f"The checkpoint in {folder} has changed since it was loaded.",
            hint="Start the workers again to serve it, or put the old one back.",
        )


_Made = tuple[Sequence[QuantisedWeight], Write]


class RememberedWeights:
    """Another source that remembers what was put where, and puts it there again. Only one thread may open it at a
    time."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._filled: list[tuple[Path, ModelSpec, torch.device, list[Place], list[_Made]]] = []
        self._specs: dict[tuple[Path, ExpertFormat, DenseFormat], ModelSpec] = {}

    def spec(self, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat = "dense") -> ModelSpec:
        found = self._source.spec(folder, expert_format, dense_format)
        self._specs[folder, expert_format, dense_format] = found
        return found

    @contextmanager
    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> Iterator[Tensors]:
        places: list[Place] = []
        made: list[_Made] = []
        with self._source.open(folder, spec, device) as tensors:
            yield _Remembering(tensors, places, made)
        self._filled.append((folder, spec, device, places, made))

    def memory(self) -> WeightMemory:
        """Return the memory of all that was filled."""
        places = (place.target for *_, places, _ in self._filled for place in places)
        return WeightMemory(chain(places, *(weight.tensors().values() for weight in self._made())))

    def forget_forms(self) -> None:
        """Give up what quantised weights keep beside themselves: it would be of no use without them."""
        for weight in self._made():
            weight.forms.forget()

    def fill_again(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Read all of it again. Raises CheckpointError, also where a folder has other weights than before."""
        for (folder, experts, linears), before in self._specs.items():
            check_same(before, self._source.spec(folder, experts, linears), folder)
        for folder, spec, device, places, made in self._filled:
            with self._source.open(folder, spec, device) as tensors:
                tensors.fill(places, device, advance)
                for _, write in made:
                    write(tensors, advance)

    def _made(self) -> Iterator[QuantisedWeight]:
        return (weight for *_, made in self._filled for weights, _ in made for weight in weights)


@dataclass(frozen=True, slots=True)
class _Remembering:
    tensors: Tensors
    places: list[Place]
    made: list[_Made]

    def shape(self, name: str) -> Shape:
        return self.tensors.shape(name)

    def stored_in(self, name: str, dtype: torch.dtype) -> bool:
        return self.tensors.stored_in(name, dtype)

    def kind(self, name: str) -> Kind | None:
        return self.tensors.kind(name)

    def read_stored(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        return self.tensors.read_stored(name, dtype)

    def nbytes(self, names: Iterable[str]) -> int:
        return self.tensors.nbytes(names)

    def make(self, weights: Sequence[QuantisedWeight], write: Write, advance: Callable[[int], None]) -> None:
        self.made.append((weights, write))
        write(self.tensors, advance)

    def fill(self, places: Sequence[Place], device: torch.device, advance: Callable[[int], None]) -> None:
        self.places.extend(places)
        self.tensors.fill(places, device, advance)
