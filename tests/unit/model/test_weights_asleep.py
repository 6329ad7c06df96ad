"""Weights that give their memory back and come back into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.checkpoints import save_checkpoint
from torch import Tensor

from services.config import ExpertFormat
from services.errors import CheckpointError
from services.model.host_memory import HUGE_PAGE_BYTES, empty, give_back
from services.model.sleep import RememberedWeights, WeightMemory, tensors_in
from services.model.weight_source import FromCheckpoint, RandomWeights
from services.model.weights import load_dense, load_experts

CPU = torch.device("cpu")
LARGE_BYTES = 96 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, "qwen2_moe")


def loaded(folder: Path, source: RememberedWeights, form: ExpertFormat = "auto") -> list[Tensor]:
    spec = source.spec(folder, form)
    how = {"dtype": torch.float32, "device": CPU, "source": source}
    return list(tensors_in((load_dense(folder, spec, **how), load_experts(folder, spec, **how))))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
@pytest.mark.parametrize("make", [FromCheckpoint, RandomWeights])
def test_what_was_dropped_is_read_again_into_the_same_tensors(
    folder: Path, make: Callable[[], RandomWeights], form: ExpertFormat
) -> None:
    source = RememberedWeights(make())
    tensors = loaded(folder, source, form)
    before, memory = [tensor.clone() for tensor in tensors], source.memory()
    unique = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}
    assert memory.nbytes == sum(unique.values()), "each storage counts once, tied and fused ones, too"
    for _ in range(2):
        memory.free(keep=True)
        assert all(map(torch.equal, tensors, before)), "kept weights of a host stay where they are"
        memory.free(keep=False)
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                tensor.zero_()  # small ones that were read into stay
        memory.restore()
        source.fill_again()
        assert all(map(torch.equal, tensors, before))


def test_a_checkpoint_that_changed_meanwhile_is_not_served(folder: Path) -> None:
    source = RememberedWeights(FromCheckpoint())
    loaded(folder, source)
    source.memory().free(keep=False)
    source.memory().restore()
    file = next(folder.glob("*.safetensors"))
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError):
        source.fill_again()


def test_other_values_of_the_same_names_and_shapes_are_not_served_either(folder: Path) -> None:
    source = RememberedWeights(FromCheckpoint())
    loaded(folder, source)
    source.memory().free(keep=False)
    source.memory().restore()
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        source.fill_again()


def test_large_weights_of_a_host_leave_its_memory_and_stay_in_place() -> None:
    """Their pages go, and come back when they are written to; the address stays."""

    def resident() -> int:
        return psutil.Process().memory_info().rss

    weights = empty((LARGE_BYTES // 4,), torch.float32, CPU).fill_(1.0)
    memory, view, full = WeightMemory([weights, weights[5:9]]), weights[5:9], resident()
    address = weights.data_ptr()
    memory.free(keep=False)
    assert full - resident() > 0.9 * LARGE_BYTES
    memory.restore()
    weights.fill_(2.0)
    assert resident() > full - 0.1 * LARGE_BYTES
    assert (weights.data_ptr(), view.tolist()) == (address, [2.0] * 4)


@pytest.mark.parametrize("nbytes", [64, HUGE_PAGE_BYTES + 4096])
def test_memory_that_is_not_mapped_for_weights_alone_is_not_taken_apart(nbytes: int) -> None:
    """numpy has seen both, so torch does not resize them; neither begins with a page of its own."""
    held = torch.ones(nbytes // 4)
    assert held.numpy()[0] == 1
    give_back(held.untyped_storage())
    assert bool((held == 1).all())


def test_tensors_are_found_in_whatever_holds_weights() -> None:
    @dataclass
    class Held:
        a: Tensor
        b: tuple[Tensor | None, ...]
        c: dict[int, list[Tensor]]
        d: int = 3

    one, two, three = (torch.zeros(1) for _ in range(3))
    assert [id(each) for each in tensors_in(Held(one, (None, two), {4: [three]}))] == [id(one), id(two), id(three)]
