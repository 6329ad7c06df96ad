"""An open-loop load: when its requests go out, whatever the server does, and the figures of what came back."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from dataclasses import replace

import pytest
from aiohttp import web

from loadgen.client import StreamResult
from loadgen.open_loop import Arrivals, Load, drive, figures, percentile_ms

LOAD = Load(
    url="",
    model="m",
    tokenizer="t",
    rate=None,
    requests=20,
    prompt_tokens=5,
    output_tokens=3,
    arrivals=Arrivals.CONSTANT,
)


def test_arrivals_have_their_rate() -> None:
    assert LOAD.times() == [0.0] * 20
    assert replace(LOAD, rate=4.0).times() == [number / 4 for number in range(20)]
    poisson = replace(LOAD, rate=4.0, requests=20_000, arrivals=Arrivals.POISSON)
    gaps = [end - begin for begin, end in itertools.pairwise(poisson.times())]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert poisson.times() == poisson.times() != replace(poisson, seed=1).times()


def test_prompts_have_their_length_and_differ() -> None:
    prompts = [*LOAD.prompts(), *replace(LOAD, seed=1).prompts()]
    assert {len(prompt) for prompt in prompts} == {5}
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert LOAD.prompts() == prompts[:20]


def answer(started: float, *chunks: float, tokens: int = 0, error: str | None = None) -> StreamResult:
    """A stream whose chunks came at these times."""
    return StreamResult(
        started=started,
        chunk_times=list(chunks),
        ended=chunks[-1] if chunks else None,
        completion_tokens=tokens or len(chunks),
        finish_reason=None if error else "length",
        done=error is None,
        error=error,
    )


def test_figures_are_those_of_the_definitions() -> None:
    results = [
        answer(0.0, 0.1, 0.2, 0.4),
        answer(1.0, 1.3, 1.5, tokens=5),  # four tokens after the first, in one chunk
        answer(0.5, 0.7),  # no token after the first
        answer(2.0, error="429: too many"),
    ]
    found = figures(results, [0.0, 0.0, 0.0, 0.1])
    assert (found.completed, found.failed, found.error) == (3, 1, "429: too many")
    assert found.requests_s == pytest.approx(3 / 1.5)
    assert found.output_tokens_s == pytest.approx(9 / 1.5)
    assert found.ttft_p50_ms == pytest.approx(200)
    assert found.tpot_p50_ms == pytest.approx(100)  # of 150 and 50
    assert found.tpot_p99_ms == pytest.approx(149)
    assert found.itl_p50_ms == pytest.approx(200)  # of 100, 200 and 200
    assert found.lag_p99_ms == pytest.approx(97)


def test_figures_without_answers_are_none() -> None:
    found = figures([answer(0.0, error="gone")], [0.0])
    assert (found.completed, found.requests_s, found.ttft_p50_ms) == (0, 0.0, None)


def test_percentiles_are_interpolated() -> None:
    assert percentile_ms([0.001, 0.002, 0.004], 50) == pytest.approx(2.0)
    assert percentile_ms([0.0, 0.1], 99) == pytest.approx(99.0)
    assert percentile_ms([0.003], 99) == pytest.approx(3.0)
    assert percentile_ms([], 50) is None


async def test_no_request_waits_for_an_answer() -> None:
    """The server answers nothing before it has all requests; one of them it refuses."""
    bodies: list[dict[str, object]] = []
    whole = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if len(bodies) == LOAD.requests:
            whole.set()
            return web.Response(status=503, text="no room")
        await whole.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in ('{"choices":[{"text":"a"}]}', '{"choices":[{"text":"b","finish_reason":"length"}]}'):
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write(b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ended: list[int] = []
    try:
        host, port = runner.addresses[0][:2]
        found = await drive(replace(LOAD, url=f"http://{host}:{port}", rate=1000.0), ended.append)
    finally:
        await runner.cleanup()
    assert (found.completed, found.failed, found.error) == (19, 1, "no room")
    assert ended == list(range(1, 21))
    assert sorted(body["prompt"] for body in bodies) == sorted(LOAD.prompts())
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 and body["temperature"] == 0 for body in bodies)


async def test_a_server_that_is_not_there_fails_all_requests() -> None:
    found = await drive(replace(LOAD, url="http://127.0.0.1:1"))
    assert (found.completed, found.failed) == (0, 20)
    assert found.error is not None
    assert "no connection to 127.0.0.1:1" in found.error
