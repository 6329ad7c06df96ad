"""Reads the header of a safetensors file, which lists its tensors and their places, and checks it against the size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from services.errors import CheckpointError
from services.model.names import Shape

DOWNLOAD_AGAIN = "Download the file again."
MAX_BYTES = 100_000_000
"""Most bytes of a header, as in the library itself: a file's first bytes must not decide how much of it is read."""
_LENGTH_BYTES = 8
"""The file starts with its header's length, in this many bytes, little-endian."""
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_BITS |= {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
"""Bits of an element by its type. Of other types only their places are checked; no tensor that is read has one."""

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""Types of weights that are not quantised."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Of more than 64 bits none is a tensor's, even where another dimension is 0."""


class _Info(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_info = msgspec.json.Decoder(_Info)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor as a file's header describes it. It begins at byte ``begin`` of the file."""

    file: Path
    dtype: str
    shape: Shape
    begin: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors in ``file`` by name.

    Raises:
        CheckpointError: it is damaged, or no safetensors file.
        OSError: it cannot be read.
    """
    raw, size = _read(file)
    try:
        infos = {name: _info.decode(item) for name, item in _header.decode(raw).items() if name != _METADATA}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, f"its header does not read ({error})") from error
    promised = _LENGTH_BYTES + len(raw) + _end(file, infos.items())
    if size < promised:
        raise _truncated(file, promised, size, _first_cut(infos.items(), size - _LENGTH_BYTES - len(raw)))
    _check_sizes(file, infos.items())
    return {
        name: TensorEntry(
            file=file,
            dtype=info.dtype,
            shape=info.shape,
            begin=_LENGTH_BYTES + len(raw) + info.data_offsets[0],
            nbytes=info.data_offsets[1] - info.data_offsets[0],
        )
        for name, info in infos.items()
    }


def _read(file: Path) -> tuple[bytes, int]:
    """Return the header's bytes, and the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself.", hint="Run `git lfs pull`.")
        stream.seek(0)
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            raise _truncated(file, _LENGTH_BYTES + length, size)
        if length > MAX_BYTES:
            raise _damaged(file, f"its header would have {length:,} bytes, more than {MAX_BYTES:,}")
        return stream.read(length), size


def _end(file: Path, infos: Iterable[tuple[str, _Info]]) -> int:
    """Return the end of the last tensor, in bytes from the header's end. Each must begin where the one before ends."""
    end = 0
    for (begin, after), name in sorted((info.data_offsets, name) for name, info in infos):
        if not begin == end <= after:
            raise _damaged(file, f'its header has "{name[:200]}" at {begin:,} to {after:,}, behind a tensor to {end:,}')
        end = after
    return end


def _check_sizes(file: Path, infos: Iterable[tuple[str, _Info]]) -> None:
    """Raise CheckpointError where a tensor has more or fewer bytes than its shape takes."""
    for name, info in infos:
        begin, after = info.data_offsets
        if info.dtype in _BITS and 8 * (after - begin) != math.prod(info.shape) * _BITS[info.dtype]:
            shown = f'"{name[:200]}" is {info.dtype} of shape {list(info.shape[:8])}'
            raise _damaged(file, f"{shown} and has {after - begin:,} bytes")


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a safetensors file, or is damaged: {reason}.", hint=DOWNLOAD_AGAIN)


def _first_cut(infos: Iterable[tuple[str, _Info]], size: int) -> str:
    """Return the first tensor that is not whole in ``size`` bytes."""
    ends = ((info.data_offsets[1], info.data_offsets[0], name) for name, info in infos)
    _, begin, name = min(each for each in ends if each[0] > size)
    return f'; the first tensor that is not whole is "{name[:200]}", of which {max(0, size - begin):,} bytes are there'


def _truncated(file: Path, promised: int, size: int, cut: str = "") -> CheckpointError:
    return CheckpointError(
        f"{file} is truncated or damaged: its header promises {promised:,} bytes, the file has {size:,}{cut}.",
        hint=DOWNLOAD_AGAIN,
    )
