"""A real redis-server that is killed, restarted from its append-only file, emptied, filled up or slow to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from testkit.models.stepping import SteppingEngine
from testkit.processes.roles import Deployment
from testkit.queue.client import check as check_answers
from testkit.queue.indexes import check
from testkit.queue.redis_server import APPEND_ONLY, EACH_SECOND
from testkit.waiting import LIMIT_S, eventually

from services.errors import ConfigError, QueueUnavailable
from services.queue.connect import check_server, command, connect, queue_errors
from services.queue.gateway_side import FIRST_ID


@pytest.fixture
def crashing(redis_server, new_redis_server):
    server = new_redis_server(redis_server.binary, *APPEND_ONLY)
    server.start()
    return server


@pytest.fixture
async def durable(crashing, new_bench) -> AsyncIterator:
    client = connect(crashing.url)
    bench = await new_bench(client)
    yield bench
    await client.aclose()


async def test_a_kill_keeps_queued_running_and_written_work(crashing, durable):
    bench = durable
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("running"))
    await bench.worker.publish("w", [bench.token(request, 0)])
    await bench.admit(bench.request("q1"), bench.request("q2"))
    assert not (await bench.scheduler.reap(bench.epoch)).held
    crashing.kill()
    for call in (
        bench.admit(bench.request()),
        bench.claim(),
        bench.worker.publish("w", [bench.token(request, 1)]),
        bench.gateway.follow(FIRST_ID, 10),
        bench.scheduler.wait_for_work(0.1),
        bench.dead.list(),
        bench.depth(),
    ):
        with pytest.raises(QueueUnavailable) as refusal:
            await call
        assert refusal.value.retry_after_s
    crashing.start()
    for index, member in ((bench.keys.leases, "running"), (bench.keys.workers, "w"), (bench.keys.gateways, "g1")):
        await bench.expire_lease(index, member)
    report = await bench.scheduler.reap(bench.epoch)
    assert report.held
    assert (report.lost, report.workers, report.gateways) == (0, 0, 0)
    await bench.gateway.heartbeat(60)
    assert await bench.worker.heartbeat("w", {"running": 1}) == set()
    assert await bench.worker.publish("w", [bench.token(request, 1, finish="stop")]) == set()
    assert [event.index for event in await bench.events()] == [0, 1]
    assert await bench.order() == ["q1", "q2"]


@pytest.mark.parametrize("cut", [1, 30, 200, 1000])
async def test_a_torn_file_holds_whole_steps_only(crashing, durable, cut):
    """The end of the file is missing, somewhere within the commands of a script."""
    bench = durable
    await bench.add_worker("w")
    for _ in range(3):
        await bench.admit(*(bench.request(tenant="a") for _ in range(3)))
        await bench.run_on("w", bench.request(tenant="b"))
    requests = {f"r{i}": 1 for i in range(12)}
    crashing.kill()
    crashing.tear(cut)
    crashing.start()
    await bench.redis.connection_pool.disconnect()
    assert await bench.state("r11") != "running"  # the last step is gone
    await check(bench)
    for request_id, (state, _) in (await bench.gateway.survey(requests)).items():
        if state == "missing":
            assert await bench.gateway.resubmit(structs.replace(bench.request(request_id), attempt=1))
    await check(bench)
    assert "missing" not in {state for state, _ in (await bench.gateway.survey(requests)).values()}


async def test_a_blocked_read_ends_when_the_server_dies(crashing, durable):
    reading = asyncio.create_task(durable.gateway.follow(FIRST_ID, 600_000))
    await asyncio.sleep(0.05)
    crashing.kill()
    with pytest.raises(QueueUnavailable):
        await asyncio.wait_for(reading, LIMIT_S)


async def test_an_emptied_redis_is_filled_again_by_its_members(durable):
    """Everything is gone: members register again, gateways resubmit what they still wait for."""
    bench = durable
    await bench.add_worker("w")
    running, queued = await bench.run_on("w", bench.request("running"), bench.request("queued"))
    await bench.redis.flushall()
    await bench.redis.script_flush()
    await bench.lead()
    await bench.gateway.heartbeat(60)
    assert await bench.worker.heartbeat("w", {"running": 1}) == {"running"}
    assert await bench.worker.publish("w", [bench.token(running, 0)]) == {"running"}
    survey = await bench.gateway.survey({"running": 1, "queued": 1})
    assert survey == {"running": ("missing", 0), "queued": ("missing", 0)}
    assert await bench.gateway.resubmit(structs.replace(running, token_ids=[*running.token_ids, 7]))
    assert await bench.gateway.resubmit(queued)
    claimed = await bench.claim()
    assert [(request.id, request.delivered) for request in claimed] == [("running", 1), ("queued", 0)]
    assert all(await bench.scheduler.assign(bench.epoch, [(request, "w") for request in claimed]))


async def test_a_survey_repairs_indexes_that_are_gone(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("running"))
    await bench.admit(bench.request("claimed"))
    await bench.claim()
    await bench.admit(bench.request("q1"), bench.request("q2"))
    for key in (
        bench.keys.leases,
        bench.keys.queue(5, "t"),
        bench.keys.ring(5),
        bench.keys.deficit(5),
        bench.keys.stats,
    ):
        await bench.redis.delete(key)
    waiting = {"running": 1, "claimed": 1, "q1": 1, "q2": 1}
    states = {request_id: state for request_id, (state, _) in (await bench.gateway.survey(waiting)).items()}
    assert states == {"running": "running", "claimed": "claimed", "q1": "queued", "q2": "queued"}
    assert await bench.depth() == (2, 24)
    assert await bench.order() == ["q1", "q2"]
    for request_id in ("running", "claimed"):
        await bench.expire_lease(bench.keys.leases, request_id)
    report = await bench.scheduler.reap(bench.epoch)
    assert (report.lost, report.requeued) == (1, 1)


async def test_a_record_that_vanished_does_not_block_the_queue(bench):
    await bench.admit(bench.request("gone"), bench.request("next"))
    await bench.redis.delete(bench.keys.request("gone"))
    assert [request.id for request in await bench.claim()] == ["next"]
    assert await bench.depth() == (0, 0)


async def test_scripts_survive_a_script_flush(bench):
    await bench.admit(bench.request("a"))
    await bench.redis.script_flush()
    await bench.admit(bench.request("b"))
    assert await bench.depth() == (2, 24)


async def test_a_full_server_is_unavailable_and_says_why(durable):
    bench = durable
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.redis.config_set("maxmemory", "1")
    with pytest.raises(QueueUnavailable, match="maxmemory"):
        await bench.admit(bench.request("b"))
    assert await bench.state("b") == "missing"
    assert await bench.depth() == (0, 0)
    with pytest.raises(QueueUnavailable, match="maxmemory"):
        await bench.worker.publish("w", [bench.token(request, 0)])
    await bench.redis.config_set("maxmemory", "0")
    assert await bench.worker.publish("w", [bench.token(request, 0)]) == set()


async def test_a_full_disk_is_unavailable_says_so_and_loses_nothing_admitted(redis_server, new_redis_server, new_bench):
    server = new_redis_server(redis_server.binary, *EACH_SECOND)
    server.start()
    client = connect(server.url)
    bench = await new_bench(client)
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("running"))
    server.fill_disk()
    admitted, refusal = [], None
    while refusal is None:  # what finds the disk full is done, and answered; what comes after it is refused
        try:
            await bench.admit(bench.request(f"q{len(admitted)}"))
            admitted.append(f"q{len(admitted)}")
        except QueueUnavailable as error:
            refusal = error
    assert "cannot write to its disk" in refusal.message
    assert refusal.retry_after_s
    for call in (
        bench.worker.publish("w", [bench.token(request, 0)]),
        bench.worker.heartbeat("w", {"running": 1}),
        bench.gateway.heartbeat(60),
        bench.claim(),
        bench.scheduler.reap(bench.epoch),
        bench.gateway.cancel(["running"]),
    ):
        with pytest.raises(QueueUnavailable, match="cannot write to its disk"):
            await call
    server.free_disk()
    await eventually(lambda: written(bench, request))
    await eventually(lambda: nothing_unwritten(client))
    server.kill()
    server.start()
    await bench.redis.connection_pool.disconnect()
    assert await bench.state("running") == "running"
    assert await bench.order() == admitted
    await check(bench)
    assert [event.index for event in await bench.events()] == [0]
    await client.aclose()


async def written(bench, request) -> bool:
    try:
        return await bench.worker.publish("w", [bench.token(request, 0)]) == set()
    except QueueUnavailable:
        return False


async def nothing_unwritten(client: Redis) -> bool:
    about = await client.info("persistence")
    return about["aof_buffer_length"] == 0 and about["aof_last_write_status"] == "ok"


async def test_streams_pause_while_the_disk_is_full_and_go_on(redis_server, new_redis_server):
    server = new_redis_server(redis_server.binary, *EACH_SECOND)
    server.start()
    async with Deployment(server.url, lease_s=0.8, max_attempts=100) as deployment:
        deployment.scheduler()
        worker = deployment.worker(engine=SteppingEngine(step_s=0.01))
        client = await deployment.client()
        streams = await client.submit(*[[n] for n in range(4)], max_tokens=60)
        await eventually(lambda: all(len(stream.tokens) >= 5 for stream in streams))
        server.fill_disk()
        await eventually(lambda: refused(deployment))
        await asyncio.sleep(2 * deployment.lease_s)  # every lease is over
        assert not any(stream.finish for stream in streams)
        server.free_disk()
        await eventually(lambda: all(stream.finish for stream in streams))
        check_answers(streams, 60)
        assert not worker.task.done()


async def refused(deployment: Deployment) -> bool:
    try:
        await deployment.connection().set("room", 1)
    except ResponseError as error:
        return "MISCONF" in str(error)
    return False


async def test_a_replica_is_unavailable_and_says_why(durable):
    await durable.redis.replicaof("127.0.0.1", "1")
    with pytest.raises(QueueUnavailable, match="primary"):
        await durable.admit(durable.request("b"))


async def test_a_silent_server_is_unavailable(monkeypatch):
    """It accepts and never answers."""
    monkeypatch.setattr("services.queue.connect.SOCKET_TIMEOUT_S", 0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    start = time.monotonic()
    with pytest.raises(QueueUnavailable, match="does not answer"):
        await command(client, "PING")
    assert time.monotonic() - start < 2
    await client.aclose()
    server.close()


async def test_nobody_listening_is_unavailable():
    client = connect("unix:///nonexistent/redis.sock")
    with pytest.raises(QueueUnavailable):
        await check_server(client)
    await client.aclose()


async def test_a_password_in_the_url(redis_server, new_redis_server):
    server = new_redis_server(redis_server.binary, "--requirepass", "secret")
    server.start(password="secret")
    good = connect(f"unix://:secret@{server.socket}")
    await check_server(good)
    await good.aclose()
    for url in (f"unix://:wrong@{server.socket}", server.url):
        bad = connect(url)
        with pytest.raises(ConfigError, match="credentials"):
            await check_server(bad)
        with pytest.raises(QueueUnavailable):
            await command(bad, "PING")
        await bad.aclose()


async def test_the_server_is_checked(redis: Redis, caplog, monkeypatch):
    await check_server(redis)
    assert caplog.text == ""
    await redis.config_set("maxmemory", "100mb")
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        await check_server(redis)
        assert "noeviction" in caplog.text
    finally:
        await redis.config_set("maxmemory", "0")
        await redis.config_set("maxmemory-policy", "noeviction")

    info = await redis.info()

    async def server(**changes: object) -> None:
        async def changed() -> dict[str, object]:
            return info | changes

        monkeypatch.setattr(redis, "info", changed)
        await check_server(redis)

    await server(tcp_port=6379, aof_enabled=0)
    assert "append-only" in caplog.text
    with pytest.raises(ConfigError, match=r"6\.2"):
        await server(redis_version="6.0.16")


async def test_errors_of_our_own_are_not_hidden(redis: Redis):
    with pytest.raises(ResponseError):
        await command(redis, "NO-SUCH-COMMAND")
    with pytest.raises(KeyError), queue_errors():
        raise KeyError("x")


async def test_many_callers_share_few_connections(redis_server):
    client = connect(redis_server.url, max_connections=4)
    assert await asyncio.gather(*(command(client, "PING") for _ in range(200))) == [True] * 200
    await client.aclose()
