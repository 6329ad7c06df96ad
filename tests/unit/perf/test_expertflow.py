"""ExpertFlow's evaluation: batches that are static, the figures of a run, and the tables and pictures of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

import httpx
from testkit.answering import Asked, answering, reply
from testkit.pictures import texts

from loadgen.drive import Driven, part_of
from loadgen.parts import summed_up
from loadgen.plan import Plan
from loadgen.workload.conversation import Turn
from perf.kit.static_batches import Batches, Proxy
from perf.server.expertflow import Measured, measured, plan, sweep, tables
from perf.server.expertflow_picture import latencies

ONE = Measured(
    way="server",
    rate=50.0,
    requests_s=48.3,
    tokens_s=3119.0,
    mean_ms=8475.2,
    min_ms=5621.9,
    max_ms=12886.6,
    ttft_p99_ms=20.4,
    failed=0,
    lag_p99_ms=0.1,
    valid=True,
    requests=[(9, 100.0), (256, 900.0)],
)


async def test_a_batch_begins_when_the_last_one_has_ended() -> None:
    batches, log = Batches(2), list[str]()

    async def request(name: str, seconds: float) -> None:
        async with batches.turn():
            log.append(f"{name} begins")
            await asyncio.sleep(seconds)
            log.append(f"{name} ends")

    await asyncio.gather(*(request(name, seconds) for name, seconds in (("a", 0.01), ("b", 0.05), ("c", 0), ("d", 0))))
    assert log[:2] == ["a begins", "a ends"]  # it came alone
    assert log.index("b ends") < log.index("d begins")
    assert log.index("c ends") < log.index("d begins")


async def test_who_leaves_while_it_waits_does_not_hold_the_batch_up() -> None:
    batches, done = Batches(1), asyncio.Event()

    async def request() -> None:
        async with batches.turn():
            await done.wait()

    first, second = asyncio.create_task(request()), asyncio.create_task(request())
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    done.set()
    await asyncio.wait_for(first, 10)
    await asyncio.wait_for(request(), 10)


def complete(asked: Asked) -> None:
    """Answers with as many words as are asked for."""
    if asked.command == "GET":
        return reply(asked, 200, "application/json", b'{"data": [{"id": "m"}]}')
    body = json.loads(asked.rfile.read(int(asked.headers["Content-Length"])))
    words = [{"choices": [{"text": "a"}]}] * (body["max_tokens"] - 1)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    events = [*words, {"choices": [{"text": "b", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    stream = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), "[DONE]"])
    return reply(asked, 200, "text/event-stream", stream.encode())


async def test_a_run_through_the_proxy_has_the_figures_of_the_tables() -> None:
    with answering(complete) as upstream:
        proxy = Proxy(host="127.0.0.1", port=int(upstream.rpartition(":")[2]), batches=Batches(4))
        async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/v1/models")).status_code == 200
            load = plan(url, 200.0, 30)
            part = await part_of(load)
    run, seen = summed_up(load, [part])
    found = measured("static", 200.0, Driven(run, seen, saturated=False))
    assert (found.failed, len(found.requests)) == (0, 30)
    lengths = [len(turn.content) + (turn.output_tokens or 0) for turn in turns(load, 30)]
    assert sorted(length for length, _ in found.requests) == sorted(lengths)
    assert found.min_ms <= found.mean_ms <= found.max_ms
    assert sweep("static", [200.0], [run]).points[0].run == run


def turns(load: Plan, requests: int) -> list[Turn]:
    return [load.source.conversation(number).turns[0] for number in range(requests)]


def test_tables_and_pictures_have_each_rate_and_way() -> None:
    every = [ONE, replace(ONE, way="static", requests_s=20.0), replace(ONE, rate=100.0)]
    lines = tables(every).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| 50", "server", "48.3"],
        ["| 50", "static", "20.0"],
        ["| 100", "server", "48.3"],
    ]
    drawn = latencies(json.loads(json.dumps({"measured": [asdict(each) for each in every]})))
    assert {"50 arrivals a second: latency, s", "100 arrivals a second: latency, s", "static batches"} <= set(
        texts(drawn)
    )
