"""Word of a process that ended: its leases end at once, those of others do not."""

from __future__ import annotations

import pytest
from msgspec import structs
from testkit.fabric.expert_floor import LEASE_S, expert

from services.queue.death_notices import DeathNotices

HOST, PID, PORT = "h", 7, 9101
PAGE = f"http://10.0.0.1:{PORT}/metrics"
ENDED = f"{HOST}-{PID}-1a2b3c4d"
OTHERS = {
    "elsewhere": ("other-h-7-1a2b3c4d", PAGE),
    "another": ("h-70-1a2b3c4d", PAGE),
    "namesake": ("h-7-5e6f7a8b", PAGE.replace(str(PORT), "9201")),
    "pageless": ("h-7-9c0d1e2f", None),
}


@pytest.fixture
async def notices(floor, monkeypatch: pytest.MonkeyPatch) -> DeathNotices:
    """An attention worker and a seat of one process that runs a request, and others like it but for one thing. They
    are reached at addresses, as where ``serve`` and ``workers`` start them."""
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    bench = floor.bench
    for name, page in ((ENDED, PAGE), *OTHERS.values()):
        info = structs.replace(bench.worker_info(name), pid=PID, metrics_url=page)
        await bench.worker.register(info, 60, credit_tokens=1000, credit_requests=10)
        seat = structs.replace(expert(f"{name}0"), host="127.0.0.1", pid=PID, metrics_url=page)
        await floor.experts.join(seat, LEASE_S)
    await floor.publish()
    await floor.reader.enter(ENDED, 60)
    await bench.run_on(ENDED, bench.request("computed"), bench.request("waiting"))
    return DeathNotices(bench.user("workers"), bench.keys, bench.limits)


async def test_what_a_process_held_goes_on_elsewhere_at_once(
    floor, notices: DeathNotices, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services.queue")
    bench = floor.bench
    await bench.worker.publish(ENDED, [bench.token(bench.request("computed"), 0)])
    assert await notices.send(PID, PORT) == 3, "its lease as a worker, its seat's, and that on the routing table"
    lost = bench.lost(await bench.events())
    assert sorted(lost) == [("computed", 2), ("waiting", 2)], (
        "their gateway hears of it before any scheduler has looked"
    )
    lines = [vars(record) for record in caplog.records if record.getMessage().startswith("lost an attempt")]
    assert sorted((line["sequence"], line["attempt"], line["worker"]) for line in lines) == [
        ("computed", 1, ENDED),
        ("waiting", 1, ENDED),
    ]
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.workers, report.lost) == (0, 0)
    reaped = await floor.registry.reap(floor.e)
    assert (len(reaped.seats), reaped.readers) == (1, 1)
    others = {name for name, _ in OTHERS.values()}
    assert {state.info.id for state in await bench.scheduler.workers()} == others
    assert set(await floor.seats()) == {f"{name}0" for name in others}


async def test_an_unknown_process_ends_no_lease(floor, notices: DeathNotices) -> None:
    assert await notices.send(PID + 2, PORT) == 0
    assert await notices.send(PID, PORT + 1) == 0
    assert len(await floor.bench.scheduler.workers()) == 5


async def test_who_lives_after_all_registers_again(floor, notices: DeathNotices) -> None:
    """Word of the wrong one costs attempts, not the worker."""
    bench = floor.bench
    assert await notices.send(PID, PORT) == 3
    await bench.worker.heartbeat(ENDED, {})
    assert ENDED in {state.info.id for state in await bench.scheduler.workers()}
