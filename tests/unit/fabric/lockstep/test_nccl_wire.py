"""What a wire over NCCL asks of its process group, for which threads that wait for one another stand in."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testkit.fabric.lockstep import Ranks, connected
from torch import Tensor

from services.fabric.lockstep.nccl import NcclWire

CPU = torch.device("cpu")
EXCHANGES = 40
ROOM = 1024


class Meeting:
    """What the ranks of an exchange have brought, by rank. As over NCCL, none goes on before all have come."""

    def __init__(self, ranks: int) -> None:
        self.brought: list[Sequence[Tensor]] = [()] * ranks
        self._all = threading.Barrier(ranks, timeout=5.0)

    def exchange(self, rank: int, out: Sequence[Tensor]) -> list[Tensor]:
        self.brought[rank] = out
        self._all.wait()
        come = [brought[rank].clone() for brought in self.brought]
        self._all.wait()
        return come


class Group:
    """A rank's end of a meeting, by the methods of torch's process groups for NCCL."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def size(self) -> int:
        return len(self._meeting.brought)

    def alltoall_base(self, into: Tensor, out: Tensor, come: list[int], go: list[int]) -> Any:
        found = self._meeting.exchange(self._rank, out.split_with_sizes(go))
        assert [len(part) for part in found] == come
        into.copy_(torch.cat(found))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)


class NcclRanks(Ranks):
    """Ranks of this process whose rows take the way of NCCL."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.meeting = Meeting(len(nodes))
        super().__init__(nodes)

    def _wire(self, rank: int, timeout_s: float) -> NcclWire:
        control = connected(rank, self.nodes, self.store.port, timeout_s)[1]
        return NcclWire(Group(self.meeting, rank), control, device=CPU, timeout_s=timeout_s)


def message(sender: int, peer: int, exchange: int) -> Tensor:
    return torch.full((1 + (sender + 3 * peer + exchange) % 9,), sender + 10 * peer + 100 * exchange)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.0])
@pytest.mark.parametrize("exact", [False, True])
def test_every_rank_takes_part_in_every_exchange_whoever_has_messages(exact: bool, share: float) -> None:
    ranks = NcclRanks(("a", "a", "b", "b"))
    chosen, everyone = random.Random(1), range(4)
    pairs = [
        [(one, other) for one in everyone for other in everyone if one != other and chosen.random() < share]
        for _ in range(EXCHANGES)
    ]
    assert any(len({rank for pair in plan for rank in pair}) < 4 for plan in pairs), (
        "a rank has nothing to do with some"
    )

    def work(rank: int) -> None:
        wire = ranks.wires[rank]
        for number, plan in enumerate(pairs):
            come = {one: message(one, rank, number) for one, other in plan if other == rank}
            peers = [peer for peer in everyone if peer != rank]
            room = (
                {peer: come[peer].nbytes if peer in come else 0 for peer in peers}
                if exact
                else dict.fromkeys(peers, ROOM)
            )
            exchange = wire.open(8 * number, room, exact=exact)
            none = torch.empty(0, dtype=torch.int64)
            exchange.send({peer: (message(rank, peer, number) if (rank, peer) in plan else none,) for peer in peers})
            found = {peer: got.view(torch.int64) for peer, got in exchange.wait().items() if len(got)}
            assert found.keys() == come.keys()
            assert all(torch.equal(found[peer], come[peer]) for peer in come)

    ranks.each(work)
    ranks.close()
