"""Reads a checkpoint folder, after checking its tensors against the spec.

(Sharded) safetensors come in from disk. Places of tensors in open files go out to ``tensor_reads.py``, whole tensors to
``reference.py``: weights that are stored quantised as float32, under their names without quantisation. The headers are
read first, so that a damaged or foreign checkpoint is refused at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from services.errors import CheckpointError
from services.model.expert_format import Kind
from services.model.header import DOWNLOAD_AGAIN, TensorEntry
from services.model.names import Shape
from services.model.sources import Source
from services.model.spec import ModelSpec
from services.model.stored_kinds import StoredKinds
from services.model.tensor_entries import tensor_entries

if TYPE_CHECKING:  # digests are made without torch
    import torch
    from torch import Tensor

    from moe_kernels import QuantisedWeight
    from services.model.dequantised.parts import Parts


class Checkpoint:
    """Reads single tensors of a checkpoint, for any number of threads. A context manager: files stay open until it is
    left.

    Raises (constructor):
        CheckpointError, UnsupportedModel: see :func:`tensor_entries`.
    """

    def __init__(self, model_dir: Path, spec: ModelSpec) -> None:
        self._entries, self._sources = tensor_entries(model_dir, spec)
        self._kinds = StoredKinds(self._entries, self._sources)
        self._seen = {file: _state(file) for file in {entry.file for entry in self._entries.values()}}
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._descriptors.clear()
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """Return the tensor called ``name``, in the dtype that it has in its file, or, if it is :meth:`quantised`, in
        float32."""
        return self._dequantised(self._sources[name]) if name in self._sources else self._stored(name)

    def quantised(self, name: str) -> bool:
        """Return whether the weight called ``name`` is stored quantised: in other tensors, by :meth:`read` alone."""
        return name in self._sources

    def kind(self, name: str) -> Kind | None:
        """Return the form in which the weight called ``name`` can be held as it is stored, if there is one."""
        return self._kinds(name)

    def read_stored(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        """Return a weight that has a :meth:`kind`, exactly, as the only expert, to be served in ``dtype``.

        Raises:
            CheckpointError: its tensors are not such that it can be held so, or ``dtype`` does not hold its values.
        """
        from services.model.dequantised.as_stored import as_stored

        source, kind = self._sources[name], self.kind(name)
        assert kind is not None, name
        return as_stored(source.format, self._parts(source), source.shape, kind, dtype)

    def shape(self, name: str) -> Shape:
        return self._sources[name].shape if name in self._sources else self._entries[name].shape

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor is; of one that is :meth:`quantised`, where its codes are."""
        return self._entries[self._sources[name].parts["codes"].name if name in self._sources else name]

    def entries(self, name: str) -> list[TensorEntry]:
        """Return where a tensor is, or all of those that make up one that is :meth:`quantised`."""
        if name not in self._sources:
            return [self._entries[name]]
        return [self._entries[stored.name] for stored in self._sources[name].parts.values()]

    def nbytes(self, names: Iterable[str]) -> int:
        """Return how many bytes the tensors ``names`` take on disk."""
        return sum(map(self._nbytes, names))

    def _nbytes(self, name: str) -> int:
        if name not in self._sources:
            return self._entries[name].nbytes
        return sum(self._entries[stored.name].nbytes // stored.share for stored in self._sources[name].parts.values())

    def fill(self, name: str, target: Tensor) -> None:
        """Fill ``target``, of any dtype and device, with a weight that is :meth:`quantised`. Raises CheckpointError."""
        from services.model.dequantised.values import dequantise

        source = self._sources[name]
        dequantise(target, source.format, self._parts(source))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield some rows after the other of a weight that is :meth:`quantised`, in float32, each until the next is
        asked for. Raises CheckpointError."""
        from services.model.dequantised.values import pieces

        source = self._sources[name]
        for _, piece in pieces(source.format, self._parts(source), source.shape):
            yield piece

    def _dequantised(self, source: Source) -> Tensor:
        from services.model.dequantised.values import dequantised

        return dequantised(source.format, self._parts(source), source.shape)

    def _parts(self, source: Source) -> Parts:
        from services.model.dequantised.parts import Part

        return {
            part: Part(
                tensor=self._stored(stored.name, stored.select),
                name=stored.name,
                file=self._entries[stored.name].file,
            )
            for part, stored in source.parts.items()
        }

    def _stored(self, name: str, select: tuple[int | slice, ...] = ()) -> Tensor:
        from services.model.stored_tensors import read_tensor

        entry = self._entries[name]
        return read_tensor(self.descriptor(entry.file), entry, name, select)

    def descriptor(self, file: Path) -> int:
        """Return a descriptor of ``file`` to read from, open until the checkpoint is left. Raises CheckpointError."""
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = self._opened(file)
            return self._descriptors[file]

    def _opened(self, file: Path) -> int:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.", hint=DOWNLOAD_AGAIN) from error
        self._stack.callback(os.close, descriptor)
        return descriptor

    def check_unchanged(self, files: Iterable[Path]) -> None:
        """Raise CheckpointError where one of ``files`` is no longer the one whose header was read."""
        for file in files:
            if _state(file) != self._seen[file]:
                raise CheckpointError(
                    f"{file} was changed while it was read.", hint="Start again once its download or copy is complete."
                )


def _state(file: Path) -> tuple[int, ...] | None:
    """Return what differs once ``file`` has been written to or replaced; None where it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
