"""Finds how experts can be held as they are stored, where only files say it. Torch-free.

Whether columns are in groups of an order of their own (act-order), and whether GPTQ's zero points are all in the
middle, is the same for all experts of a layer, or the layer could not be held in one form. So one expert of each layer
is looked at: some kilobytes of each layer's files.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.errors import CheckpointError
from services.model.expert_format import Kind
from services.model.header import DOWNLOAD_AGAIN, TensorEntry
from services.model.quantised.gptq import Gptq
from services.model.sources import EXPERTS, Source, kind_of

_DOWN = (".down_proj.weight", ".w2.weight")
_WORDS = {"I32": "i", "I64": "q"}


class StoredKinds:
    """Returns the form in which the weight of a name can be held as it is stored; None if there is none, as for weights
    in an order of their own that are no expert's.

    Raises (call):
        CheckpointError: a file cannot be read.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], sources: Mapping[str, Source]) -> None:
        self._entries, self._sources = entries, sources
        self._sorts: dict[str, bool | None] = {}
        self._zeros: dict[str, bool] = {}
        self._experts: dict[str, dict[str, list[str]]] = {}
        for name in sources:
            layer, found, expert = name.partition(EXPERTS)
            if found:
                self._experts.setdefault(layer, {}).setdefault(expert.partition(".")[0], []).append(name)

    def __call__(self, name: str) -> Kind | None:
        kind = kind_of(name, self._entries, self._sources)
        layer, found, _ = name.partition(EXPERTS)
        if kind is None:
            return None
        if not found:
            zeros = kind.zeros or self._has_zeros(name)
            return None if self._in_order_of_its_own(name, kind) else replace(kind.folded, zeros=zeros)
        if layer not in self._zeros:
            self._zeros[layer] = any(map(self._has_zeros, self._first(layer)))
        kind = replace(kind, zeros=kind.zeros or self._zeros[layer])
        if not kind.group or "order" not in self._sources[name].parts:
            return kind
        if layer not in self._sorts:
            self._sorts[layer] = self._any_sorts(layer, promised=kind.ordered)
        sorts = self._sorts[layer]
        return None if sorts is None else replace(kind, ordered=sorts)

    def _in_order_of_its_own(self, name: str, kind: Kind) -> bool:
        return bool(kind.group) and "order" in self._sources[name].parts and self._groups(name) is not None

    def _has_zeros(self, name: str) -> bool:
        """Return whether a weight in GPTQ has zero points other than the middle."""
        source = self._sources[name]
        form = source.format
        if not isinstance(form, Gptq):
            return False
        middle = (1 << (form.bits - 1)) - form.zero_offset
        usual = middle if form.bits == 8 else middle * 0x11
        entry = self._entries[source.parts["zeros"].name]
        return _bytes(entry).count(usual) < entry.nbytes

    def _first(self, layer: str) -> Sequence[str]:
        return self._experts[layer].get("0", ())

    def _any_sorts(self, layer: str, *, promised: bool) -> bool | None:
        """Return what the first expert says; where that is nothing, though config.json has an order, the first that
        does: tools leave the columns of an expert that no token met in order."""
        sorts: bool | None = False
        for names in self._experts[layer].values() if promised else [self._first(layer)]:
            sorts = self._layer_sorts(names)
            if sorts is not False:
                break
        return sorts

    def _layer_sorts(self, names: Sequence[str]) -> bool | None:
        """Return whether columns lie in an order of their own; None where it is none that a layer can be held in: of
        groups of other sizes, or one for the gate and another for the up projection."""
        orders = {name: self._groups(name) for name in names if "order" in self._sources[name].parts}
        if not all(groups is None or sorted(groups) == self._equal(name) for name, groups in orders.items()):
            return None
        if not any(orders.values()):
            return False
        halves = [groups for name, groups in orders.items() if not name.endswith(_DOWN)]
        return True if all(groups == halves[0] for groups in halves) else None

    def _groups(self, name: str) -> list[int] | None:
        """Return each column's group; None where they follow one another, or the tool left what says that they do."""
        source = self._sources[name]
        entry = self._entries[source.parts["order"].name]
        groups = array(_WORDS[entry.dtype], _bytes(entry)).tolist()
        unused = -1 in groups
        if isinstance(source.format, Gptq):
            unused = not source.format.sorts and not any(groups)
        return None if unused or groups == self._equal(name) else groups

    def _equal(self, name: str) -> list[int]:
        kind = kind_of(name, self._entries, self._sources)
        columns = self._sources[name].shape[1]
        return [] if kind is None else [column // (kind.group or columns) for column in range(columns)]


def _bytes(entry: TensorEntry) -> bytes:
    try:
        with entry.file.open("rb", buffering=0) as data:
            found = os.pread(data.fileno(), entry.nbytes, entry.begin)
    except OSError as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error}.", hint=DOWNLOAD_AGAIN) from error
    if len(found) < entry.nbytes:
        raise CheckpointError(f"{entry.file} was truncated while it was read.", hint=DOWNLOAD_AGAIN)
    return found
