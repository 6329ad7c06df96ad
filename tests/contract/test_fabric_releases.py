"""The fabric between two releases: processes of 2d85cd8, run by its own code, with those of this one, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from testkit.fabric.tcp import linked, seat_of, send, serve, table_of
from testkit.processes.earlier import LAST_RELEASE, ROOT, has_history, unpack
from testkit.processes.release_processes import peer
from testkit.processes.servers import free_port
from testkit.waiting import until

from services.fabric.tcp.peer import Timing
from services.fabric.tcp.versions import SPOKEN, Versions
from services.routing import Seat

LATER = Versions(2, 3)
"""Of a release that speaks with the last one no more."""
GENEROUS = Timing(handshake_s=20.0, alive_s=0.5, silence_s=20.0)
ONES = torch.ones(3, 4)
WAYS = ["frames", "lane", "memory", "weights"]


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_history():
        pytest.skip(f"this clone does not know {LAST_RELEASE}")
    folder = unpack(tmp_path_factory.mktemp("last-release"))
    assert "PROTOCOL = 1" in (folder / "services/fabric/tcp_wire.py").read_text(), "another commit than was meant"
    return folder


@pytest.mark.parametrize("older", ["experts", "attention"])
def test_an_older_half_serves_with_a_newer_one_by_every_way(last: Path, older: str) -> None:
    """Frames, a lane, shared memory, and weights for one that joins."""
    experts, attention = (last, ROOT) if older == "experts" else (ROOT, last)
    with peer(experts, role="serve") as seat, peer(attention, role="use", port=seat.hear()["port"]) as user:
        assert [user.hear().get("way") for _ in WAYS] == WAYS
        assert user.code() == 0
        seat.go_on()
        assert seat.hear()["calls"] >= 2, "rows in frames and by the lane"
        assert seat.code() == 0


@pytest.mark.parametrize("older", [0, 1])
def test_ranks_of_both_releases_meet(last: Path, older: int) -> None:
    folders, port = [last if number == older else ROOT for number in range(2)], free_port()
    with peer(folders[0], role="rank", rank=0, port=port) as first:
        with peer(folders[1], role="rank", rank=1, port=port) as second:
            met = {"nodes": ["n", "n"], "sum": 3}
            assert (first.hear(), second.hear()) == (met, met)
            assert second.code() == 0
        assert first.code() == 0


def test_attention_of_the_last_release_is_refused_by_name_where_nothing_is_in_common(last: Path) -> None:
    server = serve(spoken=LATER, timing=GENEROUS)
    try:
        with peer(last, role="hopeless", port=server.address[1]) as older:
            heard = older.hear()
            assert older.code() == 0
        assert heard["problem"] == "ProtocolMismatch"
        assert "speaks version 1 of the fabric's protocol" in heard["message"]
        assert "(release 0) versions 2 to 3" in heard["message"]
        assert server.faults.totals()["protocol_mismatch"] >= 1
        with linked(table_of(seat_of(server, 0)), spoken=LATER, timing=GENEROUS) as link:
            assert torch.equal(send(link, ONES), 2 * ONES), "the seat serves those that it can"
    finally:
        server.close()


def test_experts_of_the_last_release_are_refused_by_name_and_live(last: Path) -> None:
    with peer(last, role="serve") as older:
        seat = Seat(number=0, worker="experts-0", group=0, host="127.0.0.1", port=older.hear()["port"])
        with linked(table_of(seat), spoken=LATER, timing=GENEROUS, ready=False) as link:
            (only,) = link._seats.links.values()
            until(lambda: only.problem is not None, "the seat is refused")
            assert type(only.problem).__name__ == "ProtocolMismatch"
            assert "(release 0) speaks version 1" in only.problem.message
            assert "(release 0) versions 2 to 3" in only.problem.message
            assert link.faults()["protocol_mismatch"] >= 1
        for spoken in (SPOKEN, Versions(1, 3)):
            with linked(table_of(seat), spoken=spoken, timing=GENEROUS) as link:
                assert torch.equal(send(link, ONES), ONES)
        older.go_on()
        assert older.hear()["calls"] == 2
        assert older.code() == 0
