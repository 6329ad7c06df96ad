"""On a GPU: clients of a seat whose steps run as one get every answer to the bit, also while one gives steps up."""

from __future__ import annotations

import pytest
import torch

from perf.fabric.exchange.clients import LAYERS, Case, measure
from perf.fabric.exchange.world import World

WORLD = World(hidden=512, experts=16, slots=4, layers=LAYERS, rows=24, micro_batches=1)


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("clients", [2, 3, 8])
def test_each_gets_its_own_answers(clients: int, stops: bool) -> None:
    case = Case(world=WORLD, clients=clients, pause_us=20, way="together", check=True, stops=stops)
    found = measure(case, torch.device("cuda", 0), "vmm")
    assert found["wrong"] == [0] * clients
    assert found["again"] == [0] * clients or clients == 8, "so many on one GPU may miss a deadline of 20 ms"
    assert found["together"] > 0.2
