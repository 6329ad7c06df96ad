"""Reading weights into their places: every byte where it belongs, whatever the pieces; changed files are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.tiny_models import QWEN3, save_model
from torch import Tensor

from services.errors import CheckpointError, OutOfMemory
from services.model import tensor_reads
from services.model.checkpoint import Checkpoint
from services.model.device import into_memory
from services.model.host_memory import HUGE_PAGE_BYTES, empty, release_pinned
from services.model.load_spec import load_spec
from services.model.tensor_reads import HostCopies, Lane, Place, read_tensors

CPU = torch.device("cpu")
NAME = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path, QWEN3)
    return tmp_path


def loaded(
    folder: Path, dtype: torch.dtype, advance: Callable[[int], None] = lambda _: None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of the file as the library reads them, and as they come into places of ``dtype``."""
    stored = load_file(folder / "model.safetensors")
    places = {name: torch.full(tensor.shape, torch.nan, dtype=dtype) for name, tensor in stored.items()}
    with Checkpoint(folder, load_spec(folder)) as checkpoint:
        wanted = [Place(name=name, target=target) for name, target in places.items()]
        read_tensors(checkpoint, wanted, CPU, advance, threads=3)
    return stored, places


@pytest.mark.parametrize("piece_bytes", [8, 24, 1000, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_byte_comes_to_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", piece_bytes)
    read: list[int] = []
    stored, places = loaded(folder, dtype, read.append)
    for name, tensor in stored.items():
        torch.testing.assert_close(places[name], tensor.to(dtype), atol=0, rtol=0)
    assert sum(read) == sum(tensor.nbytes for tensor in stored.values())
    assert max(read) <= piece_bytes


def test_a_file_that_ends_early_while_it_is_read(folder: Path) -> None:
    file = folder / "model.safetensors"
    with Checkpoint(folder, load_spec(folder)) as checkpoint:
        entry = checkpoint.entry(NAME)
        os.truncate(file, entry.begin + entry.nbytes // 2)
        place = Place(name=NAME, target=torch.empty(entry.shape))
        with pytest.raises(CheckpointError, match=r"model\.safetensors was truncated while it was read"):
            read_tensors(checkpoint, [place], CPU, lambda _: None)


@pytest.mark.parametrize("way", ["written", "replaced", "gone"])
def test_a_file_that_changes_while_it_is_read(folder: Path, way: str) -> None:
    file = folder / "model.safetensors"

    def change(_: int) -> None:
        if way == "written":
            os.utime(file, ns=(0, 0))
        elif way == "gone":
            file.unlink(missing_ok=True)
        else:
            save_file(load_file(file), folder / "next")
            (folder / "next").replace(file)

    with pytest.raises(CheckpointError, match="was changed while it was read"):
        loaded(folder, torch.float32, change)


def test_what_the_progress_raises_ends_the_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 8)
    read: list[int] = []

    def stop(nbytes: int) -> None:
        read.append(nbytes)
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        loaded(folder, torch.float32, stop)
    assert read == [8]


class LateCopies:
    """Copies as a GPU does: some time later, at the latest when somebody waits for it."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def copy(self, target: Tensor, staged: Tensor) -> LateCopies:
        self._pending.append((target, staged))
        self.most = max(self.most, len(self._pending))
        return self

    def wait(self) -> None:
        for target, staged in self._pending:
            target.copy_(staged)
        self._pending.clear()

    finish = wait


def test_a_buffer_is_not_read_into_before_its_copy_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that come late stand in for those of a GPU; all else is the code that a GPU's weights take."""
    made: list[LateCopies] = []

    def lane(_: torch.device) -> Lane:
        made.append(LateCopies())
        return Lane(made[-1], pinned=False)

    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 64)
    monkeypatch.setattr(tensor_reads, "_lane", lane)
    stored, places = loaded(folder, torch.bfloat16)
    assert [copies.most for copies in made] == [tensor_reads.BUFFERS] * 3
    for name, tensor in stored.items():
        torch.testing.assert_close(places[name], tensor.bfloat16(), atol=0, rtol=0)


def test_a_thread_has_two_buffers_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 64)
    buffers: set[int] = set()

    class Noting(HostCopies):
        def copy(self, target: Tensor, staged: Tensor) -> tensor_reads.Awaited:
            buffers.add(staged.data_ptr())
            return super().copy(target, staged)

    monkeypatch.setattr(tensor_reads, "_lane", lambda _: Lane(Noting(), pinned=False))
    loaded(folder, torch.bfloat16)
    assert len(buffers) <= 3 * tensor_reads.BUFFERS


def test_buffers_are_dropped_before_pinned_memory_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is loaded, of which the device's name and lanes of the host stand in here."""
    made: list[Lane] = []
    left: list[int] = []

    def lane(_: torch.device) -> Lane:
        made.append(Lane(HostCopies(), pinned=False))
        return made[-1]

    monkeypatch.setattr(tensor_reads, "_lane", lane)
    monkeypatch.setattr(tensor_reads, "release_pinned", lambda: left.extend(len(each._buffers) for each in made))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    target = torch.empty(load_file(folder / "model.safetensors")[NAME].shape, dtype=torch.bfloat16)
    with Checkpoint(folder, load_spec(folder)) as checkpoint:
        read_tensors(checkpoint, [Place(name=NAME, target=target)], torch.device("cuda"), lambda _: None, threads=2)
    assert left == [0, 0]


@pytest.mark.parametrize("named", ["empty_host_cache", "_host_emptyCache", None])
def test_pinned_memory_goes_back_by_what_this_torch_has(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.13 has a function of its own for it, 2.11 that of its allocator, and a torch without CUDA may have neither."""
    called: list[str] = []
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    for of, name in ((torch._C, "_host_emptyCache"), (torch.accelerator, "empty_host_cache")):
        if named == name:
            monkeypatch.setattr(of, name, lambda: called.append("released"), raising=False)
    release_pinned()
    assert called == ["released"] * (named is not None)


@pytest.mark.parametrize("nbytes", [0, 10, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 2])
def test_large_tensors_are_like_any_others(nbytes: int) -> None:
    made = empty((nbytes // 2,), torch.bfloat16, CPU)
    assert (made.shape, made.dtype, made.device) == ((nbytes // 2,), torch.bfloat16, CPU)
    made.fill_(1)
    assert made.sum(dtype=torch.float64) == nbytes // 2


def test_more_memory_than_there_is_is_an_error_with_a_way_out() -> None:
    with pytest.raises(OutOfMemory, match=r"memory of cpu ran out.*--layout disaggregated"), into_memory(CPU):
        empty((1 << 50,), torch.uint8, CPU)


def test_memory_goes_back_when_a_large_tensor_is_dropped() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")

    nbytes, before = 512 << 20, mapped()
    whole = empty((4, nbytes // 4), torch.uint8, CPU)
    part = whole[2, :100]
    del whole
    assert mapped() >= before + nbytes
    del part
    assert mapped() < before + nbytes // 2
