"""Where a model's weights come from: its checkpoint, or a generator of random numbers.

In: a folder with a config.json. Out: the spec, and tensors by the names that they have on the hub, one at a time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.model.checkpoint import Checkpoint
from services.model.header import TensorEntry
from services.model.load_spec import load_spec
from services.model.names import EMBED, dense_shapes, expert_shapes
from services.model.spec import ModelSpec
from services.model.weights_sample import with_weights


class Tensors(Protocol):
    """Tensors by name. :class:`services.model.checkpoint.Checkpoint` is one."""

    def read(self, name: str) -> Tensor: ...

    def entry(self, name: str) -> TensorEntry: ...

    def nbytes(self, names: Iterable[str]) -> int: ...


class WeightSource(Protocol):
    """Finds the weights of the model in a folder."""

    def spec(self, folder: Path) -> ModelSpec:
        """Return the spec. Raises CheckpointError, UnsupportedModel: the model is not one that can be served."""

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        """Return the tensors, which may lie on ``device``. Raises CheckpointError: there are none."""


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Reads what the folder has."""

    def spec(self, folder: Path) -> ModelSpec:
        return with_weights(load_spec(folder), folder)

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        del device
        return Checkpoint(folder, spec)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Draws what config.json describes. The folder needs no weights; those that it has are not read."""

    seed: int = 0

    def spec(self, folder: Path) -> ModelSpec:
        return load_spec(folder)

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        return nullcontext(RandomTensors(folder, spec, device, self.seed))


class RandomTensors:
    """Equal for equal seeds and kinds of devices. Embeddings have a variance of one, so that rows of different tokens
    go different ways; other matrices keep the size of a row, with a variance of one over their columns. Norms are ones
    and biases zeros, as in a model whose training begins."""

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device, seed: int) -> None:
        self._folder, self._device, self._seed = folder, device, seed
        self._shapes = dense_shapes(spec) | expert_shapes(spec)

    def read(self, name: str) -> Tensor:
        """Return the tensor called ``name``, in float32."""
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        std = 1.0 if name == EMBED else shape[-1] ** -0.5
        return torch.empty(shape, device=self._device).normal_(std=std, generator=generator)

    def entry(self, name: str) -> TensorEntry:
        shape = self._shapes[name]
        return TensorEntry(file=self._folder, dtype="F32", shape=shape, begin=0, nbytes=4 * math.prod(shape))

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(self.entry(name).nbytes for name in names)
