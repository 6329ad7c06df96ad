"""Measurements in, small files in ``records/`` out, and back: the same values always give the same bytes."""

from __future__ import annotations

import csv
import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pocket_moe.errors import PocketError

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_NIBBLE_EXPERTS: Final = 16
_DAMAGE: Final = (  # what zipfile, its decompressors and numpy raise for bytes that are not theirs
    *(OSError, EOFError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError),
    *(RuntimeError, struct.error, lzma.LZMAError, zlib.error, zipfile.BadZipFile),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTrace:
    """The experts that each of N held-out tokens chose in L layers, K each, documents in the order they were read.

    ``ids`` uint8 ``[N, L, K]``, ascending within a token and layer (the router's order is not kept). Document d is
    tokens ``starts[d]..starts[d + 1]``, of domain ``domains[document_domain[d]]``; a batch of requests is replayed by
    taking documents in turn. ``starts`` int64 ``[documents + 1]``, ``document_domain`` uint8 ``[documents]``.

    Example: ``trace = ExpertTrace.load(path)``; ``trace.ids[trace.domain == 2, 0]`` are domain 2's choices in layer 0.
    """

    ids: NDArray[np.uint8]
    starts: NDArray[np.int64]
    document_domain: NDArray[np.uint8]
    domains: tuple[str, ...]
    experts: int

    @property
    def domain(self) -> NDArray[np.uint8]:
        """``[N]``: of each token."""
        return np.repeat(self.document_domain, np.diff(self.starts))

    def counts(self) -> NDArray[np.int64]:
        """``[D, L, E]``: how many tokens of a domain chose an expert."""
        tokens, layers, _ = self.ids.shape
        cell = self.domain[:, None, None].astype(np.int64) * layers + np.arange(layers)[:, None]
        flat = np.bincount(
            (cell * self.experts + self.ids).ravel(), minlength=len(self.domains) * layers * self.experts
        )
        assert int(flat.sum()) == self.ids.size, f"{tokens} tokens have ids below {self.experts}"
        return flat.reshape(len(self.domains), layers, self.experts).astype(np.int64)

    def save(self, path: Path) -> None:
        """Two ids a byte where there are at most 16 experts; token by token, whose layers resemble one another."""
        ids_NLK = np.ascontiguousarray(self.ids)
        arrays: dict[str, NDArray[Any]] = {
            "ids": _nibbles(ids_NLK) if self.experts <= _NIBBLE_EXPERTS else ids_NLK,
            "shape": np.array([*self.ids.shape, self.experts], np.int64),
            "lengths": np.diff(self.starts).astype(np.uint16),
            "document_domain": self.document_domain,
            "domains": np.array(self.domains),
        }
        _save_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> ExpertTrace:
        """Raises PocketError if the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays: dict[str, NDArray[Any]] = {name: file[name] for name in file.files}
            _, _, slots, experts = arrays["shape"].tolist()
            ids_NLK = _unpacked(arrays["ids"], slots) if experts <= _NIBBLE_EXPERTS else arrays["ids"]
            _check_trace(arrays, ids_NLK)
        except _DAMAGE as error:
            raise _unreadable(path, error) from error
        return cls(
            ids=np.ascontiguousarray(ids_NLK),
            starts=np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)]),
            document_domain=arrays["document_domain"],
            domains=tuple(arrays["domains"].tolist()),
            experts=experts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """A prompt and what the reference answers to it, the end token included if it came.

    ``margin``: the smallest gap, in logits, between the best and the second best token on the way; ``router_margin``:
    in probability, between the last expert chosen and the first not. Where one is small, another rounding may answer
    otherwise.
    """

    id: str
    domain: str
    prompt: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    margin: float
    router_margin: float


def save_greedy(path: Path, answers: Iterable[Greedy]) -> None:
    """One a line; margins to four digits."""
    _write(path, "".join(json.dumps(_line(answer), ensure_ascii=False) + "\n" for answer in answers))


def load_greedy(path: Path) -> list[Greedy]:
    """Raises PocketError if the file is missing or damaged."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return [
            Greedy(**row | {"prompt_ids": tuple(row["prompt_ids"]), "output_ids": tuple(row["output_ids"])})
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Sorted keys; lists of plain values on one line, so that a diff stays readable."""
    _write(path, _indented(values, "") + "\n")


def load_json(path: Path) -> dict[str, Any]:
    """Raises PocketError if the file is missing or damaged."""
    try:
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return values


def save_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    _write(path, text.getvalue())


def load_csv(path: Path) -> list[dict[str, str]]:
    """Raises PocketError if the file is missing."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise _unreadable(path, error) from error


def _line(answer: Greedy) -> dict[str, Any]:
    margins = {name: float(f"{getattr(answer, name):.4g}") for name in ("margin", "router_margin")}
    return asdict(answer) | margins


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _indented(value: Any, indent: str) -> str:
    if isinstance(value, Mapping) and value:
        inner = indent + "  "
        items = (f"{inner}{json.dumps(str(key))}: {_indented(value[key], inner)}" for key in sorted(value, key=str))
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (list, Mapping)) for item in value):
        inner = indent + "  "
        return "[\n" + ",\n".join(inner + _indented(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _nibbles(ids_NLK: NDArray[np.uint8]) -> NDArray[np.uint8]:
    even_NLK = np.pad(ids_NLK, ((0, 0), (0, 0), (0, ids_NLK.shape[2] % 2)))
    return (even_NLK[:, :, 0::2] | (even_NLK[:, :, 1::2] << 4)).astype(np.uint8)


def _unpacked(packed: NDArray[np.uint8], slots: int) -> NDArray[np.uint8]:
    ids_NLK = np.stack([packed & 15, packed >> 4], axis=3).reshape(*packed.shape[:2], -1)
    return ids_NLK[:, :, :slots].astype(np.uint8)


def _check_trace(arrays: Mapping[str, NDArray[Any]], ids_NLK: NDArray[np.uint8]) -> None:
    """Raises ValueError where the arrays of a trace contradict one another."""
    tokens, layers, slots, experts = arrays["shape"].tolist()
    lengths, domain = arrays["lengths"], arrays["document_domain"]
    if ids_NLK.shape != (tokens, layers, slots) or ids_NLK.max(initial=0) >= experts:
        raise ValueError(f"ids of shape {ids_NLK.shape} are not {slots} of {experts} experts for {tokens} tokens")
    if int(lengths.sum(dtype=np.int64)) != tokens or lengths.shape != domain.shape:
        raise ValueError(f"the lengths of its documents do not add up to {tokens} tokens")
    if domain.max(initial=0) >= len(arrays["domains"]):
        raise ValueError(f"a document is of domain {domain.max()}, of {len(arrays['domains'])}")


def _save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """An npz that ``np.load`` reads, without the time of day, and with LZMA: a tenth smaller than numpy's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)
            info.compress_type = zipfile.ZIP_LZMA
            archive.writestr(info, member.getvalue())


def _unreadable(path: Path, error: Exception) -> PocketError:
    return PocketError(
        f"The record {path} cannot be read: {error}",
        hint="Make it again; examples/pocket-moe/README.md names the script.",
    )
