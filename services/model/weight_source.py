"""Where a model's weights come from: its checkpoint, or a generator of random numbers.

In: a folder with a config.json. Out: the spec, and tensors by the names that they have on the hub, put into places.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels import QuantisedWeight
from services.config import DenseFormat, ExpertFormat
from services.errors import ConfigError
from services.model.checkpoint import Checkpoint
from services.model.expert_format import Kind
from services.model.held_experts import held_experts
from services.model.load_spec import load_spec
from services.model.names import EMBED, Shape, dense_shapes, expert_shapes
from services.model.sources import promised_kinds
from services.model.spec import ModelSpec
from services.model.stored_tensors import DTYPES
from services.model.tensor_reads import Place, read_tensors, refuse_overflow
from services.model.weights_sample import with_weights

Write = Callable[["Tensors", Callable[[int], None]], None]
"""Writes weights that are computed from tensors; the second argument is called with the bytes that were read."""


class Tensors(Protocol):
    """Tensors by name."""

    def shape(self, name: str) -> Shape: ...

    def stored_in(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a tensor is stored in ``dtype``."""

    def kind(self, name: str) -> Kind | None:
        """Return the form in which a weight can be held as it is stored; None: as numbers, or rounded."""

    def read_stored(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        """Return a weight that has a :meth:`kind`, as the only expert, to be served in ``dtype``. Raises
        CheckpointError."""

    def nbytes(self, names: Iterable[str]) -> int:
        """Return how many bytes they are before they are put anywhere."""

    def make(self, weights: Sequence[QuantisedWeight], write: Write, advance: Callable[[int], None]) -> None:
        """Have ``write`` fill ``weights`` from tensors that it gets. A source whose weights are dropped in between
        calls it again. Raises what it raises."""

    def fill(self, places: Sequence[Place], device: torch.device, advance: Callable[[int], None]) -> None:
        """Fill ``places``, which are on ``device``. ``advance`` is called with the bytes that were put there.

        Raises:
            CheckpointError: there is something wrong with them.
        """


class WeightSource(Protocol):
    """Finds the weights of the model in a folder."""

    def spec(self, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat = "dense") -> ModelSpec:
        """Return the spec, with how experts and other linear layers are held.

        Raises:
            CheckpointError, UnsupportedModel: the model is not one that can be served.
            ConfigError: its experts cannot be held so.
        """

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        """Return the tensors, which may lie on ``device``. Raises CheckpointError: there are none."""


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Reads what the folder has."""

    def spec(self, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat = "dense") -> ModelSpec:
        return with_weights(load_spec(folder), folder, expert_format, dense_format)

    @contextmanager
    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> Iterator[Tensors]:
        del device
        with Checkpoint(folder, spec) as checkpoint:
            yield StoredTensors(checkpoint)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Those of a checkpoint."""

    checkpoint: Checkpoint

    def shape(self, name: str) -> Shape:
        return self.checkpoint.shape(name)

    def stored_in(self, name: str, dtype: torch.dtype) -> bool:
        return DTYPES.get(self.checkpoint.entry(name).dtype) == dtype and not self.checkpoint.quantised(name)

    def kind(self, name: str) -> Kind | None:
        return self.checkpoint.kind(name)

    def read_stored(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        found = self.checkpoint.read_stored(name, dtype)
        self.checkpoint.check_unchanged({entry.file for entry in self.checkpoint.entries(name)})
        return found

    def nbytes(self, names: Iterable[str]) -> int:
        return self.checkpoint.nbytes(names)

    def make(self, weights: Sequence[QuantisedWeight], write: Write, advance: Callable[[int], None]) -> None:
        del weights
        write(self, advance)

    def fill(self, places: Sequence[Place], device: torch.device, advance: Callable[[int], None]) -> None:
        """Weights that are stored quantised are computed one at a time, the others read by several threads."""
        stored = self.checkpoint
        plain = [place for place in places if not stored.quantised(place.name)]
        quantised = [place for place in places if stored.quantised(place.name)]
        if plain:
            read_tensors(stored, plain, device, advance)
        for place in quantised:
            stored.fill(place.name, place.target)
            refuse_overflow(place.name, stored.entry(place.name).file, place.target)
            advance(stored.nbytes([place.name]))
        stored.check_unchanged({entry.file for place in quantised for entry in stored.entries(place.name)})


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Draws what config.json describes, experts in the form in which it says that they are stored. The folder needs no
    weights; those that it has are not read."""

    seed: int = 0

    def spec(self, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat = "dense") -> ModelSpec:
        spec = load_spec(folder)
        if dense_format == "stored" and spec.quantisation is not None:
            raise ConfigError(
                "--dense-format stored holds what a checkpoint has, and random weights are none.",
                hint="Leave it out, or load a checkpoint.",
            )
        promised = promised_kinds(spec)

        def rounded(name: str) -> Kind | None:
            kind = promised(name)
            return None if kind is None else kind.rounded

        return dataclasses.replace(spec, experts=held_experts(spec, expert_format, rounded, folder))

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        del folder
        return nullcontext(RandomTensors(spec, device, self.seed))


class RandomTensors:
    """Equal for equal seeds and kinds of devices. Embeddings have a variance of one, so that rows of different tokens
    go different ways; other matrices keep the size of a row, with a variance of one over their columns. Norms are ones
    and biases zeros, as in a model whose training begins."""

    def __init__(self, spec: ModelSpec, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._shapes = dense_shapes(spec) | expert_shapes(spec)

    def read(self, name: str) -> Tensor:
        """Return the tensor called ``name``, in float32."""
        shape = self._shapes[name]
        if name.endswith("bias"):
            return torch.zeros(shape, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        std = 1.0 if name == EMBED else shape[-1] ** -0.5
        return torch.empty(shape, device=self._device).normal_(std=std, generator=generator)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def stored_in(self, name: str, dtype: torch.dtype) -> bool:
        """They would be in the dtype that config.json names."""
        del name
        return dtype == self._dtype

    def kind(self, name: str) -> Kind | None:
        del name
        return None

    def read_stored(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        del dtype
        raise AssertionError(f"{name} is drawn, not stored")

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(4 * math.prod(self._shapes[name]) for name in names)

    def make(self, weights: Sequence[QuantisedWeight], write: Write, advance: Callable[[int], None]) -> None:
        del weights
        write(self, advance)

    def fill(self, places: Sequence[Place], device: torch.device, advance: Callable[[int], None]) -> None:
        del device
        for place in places:
            place.target.copy_(self.read(place.name))
            advance(self.nbytes([place.name]))
