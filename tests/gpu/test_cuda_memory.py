"""Memory of a GPU that two processes map: each sees what the other writes, and the owner may close it first."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from testkit.gpu.neighbour import GPU, SIZE, changed, mapped, neighbour, numbers

from services.errors import FabricError
from services.fabric.shared_memory.cuda_memory import CudaMemory
from services.fabric.shared_memory.memory import NONCE_BYTES

pytestmark = pytest.mark.gpu1
ANSWER_S = 90.0


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    made = CudaMemory(GPU)
    yield made
    made.close()


def test_two_processes_write_into_it_and_it_outlives_its_owner(memory: CudaMemory) -> None:
    region = memory.share(SIZE)
    assert not region.bytes.any()
    region.bytes[:8] = numbers(1)
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=neighbour, args=(theirs, region.handle), daemon=True)
    process.start()
    theirs.close()  # so that its death ends the wait
    assert pipe.poll(ANSWER_S)
    refused, seen, own = pipe.recv()
    assert "on this worker's own GPU" in refused
    assert (seen, own) == (list(range(1, 9)), False)
    assert region.bytes[-8:].tolist() == list(range(100, 108))
    region.close()
    pipe.send("closed")
    assert pipe.poll(ANSWER_S)
    assert pipe.recv() == list(range(1, 9))
    process.join(ANSWER_S)
    assert process.exitcode == 0


def test_its_own_process_may_open_it(memory: CudaMemory) -> None:
    region = memory.share(SIZE)
    mapping = memory.open(region.handle)
    assert mapping.own
    mapped(mapping.address)[:8] = numbers(7)
    assert region.bytes[:8].tolist() == list(range(7, 15))
    mapping.close()
    region.close()


@pytest.mark.parametrize("facts", [{"nonce": bytes(NONCE_BYTES)}, {"nonce_at": 0}, {"size": SIZE + 1}])
def test_a_handle_of_other_memory_is_refused(memory: CudaMemory, facts: dict[str, Any]) -> None:
    region = memory.share(SIZE)
    with pytest.raises(FabricError, match="does not belong to its handle"):
        memory.open(changed(region.handle, **facts))
    region.close()
