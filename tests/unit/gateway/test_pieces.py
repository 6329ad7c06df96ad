"""Long answers in pieces: the same JSON, whatever the cuts; a prompt's scores come once, for all of its choices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs
from testkit.queue.scores import packed
from testkit.waiting import eventually

from services.gateway import openai_format
from services.messages import TokenEvent, TokenLogprob

TEXT = "the quick brown fox — 你好! " * 12
SCORED = {"prompt": "the quick brown fox", "echo": True, "logprobs": 0, "max_tokens": 5}


def scores(request: Any, first: int, last: int) -> TokenEvent:
    """Of the prompt's tokens ``first`` to ``last``, as a worker sends them."""
    width = request.sampling.prompt_logprobs
    found = [
        TokenLogprob(-position / 8, [(position % 50 + rank, -rank / 4) for rank in range(width)])
        for position in range(first, last)
    ]
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=0, scores=packed(first, found, width))


def without_scores(request: Any) -> Any:
    return structs.replace(request, sampling=structs.replace(request.sampling, prompt_logprobs=None))


async def test_a_prompt_is_scored_once_and_shown_by_each_of_its_choices(gateway, script):
    """The prompts are scored in two parts, before their first token."""

    def answer(request: Any) -> list[TokenEvent]:
        scored = request.sampling.prompt_logprobs is not None
        parts = [scores(request, 1, 2), scores(request, 2, request.prompt_len)] if scored else []
        return [*parts, *script.events(without_scores(request), gateway.ids(" there"))]

    gateway.queue.answer = answer
    body = {"prompt": ["the quick brown fox", "hello world"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": 5}
    choices = (await gateway.http.post("/v1/completions", json=body)).json()["choices"]
    asked = [request.sampling.prompt_logprobs for request in gateway.queue.admitted]
    assert asked == [2, None, None, 2, None, None]
    assert [choice["text"] for choice in choices] == ["the quick brown fox there"] * 3 + ["hello world there"] * 3
    for first in (0, 3):
        assert choices[first]["logprobs"] == choices[first + 1]["logprobs"] == choices[first + 2]["logprobs"]
        logprobs = choices[first]["logprobs"]
        assert logprobs["token_logprobs"][:3] == [None, -0.125, -0.25]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choices[first]["text"][offset:].startswith(token)
        assert len(logprobs["top_logprobs"][1]) >= 2


async def test_choices_wait_for_the_scores_of_their_prompt(gateway, script):
    task, first = await gateway.ask(**SCORED, n=2)
    second = gateway.queue.admitted[1]
    gateway.queue.emit(*script.events(second, gateway.ids(" there")))
    gateway.queue.emit(scores(first, 1, 3), scores(first, 1, 3))  # one part, doubled
    rest = scores(first, 3, first.prompt_len)
    gateway.queue.emit(rest, *script.events(without_scores(first), gateway.ids(" you")))
    choices = (await task).json()["choices"]
    assert [choice["text"] for choice in choices] == ["the quick brown fox you", "the quick brown fox there"]
    assert all(choice["logprobs"]["token_logprobs"][2] == -0.25 for choice in choices)


async def test_scores_begin_again_with_the_attempt(gateway, script):
    task, request = await gateway.ask(**SCORED)
    gateway.queue.emit(scores(request, 1, 3), script.lost(request, 2))
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert again.sampling.prompt_logprobs == 0
    gateway.queue.emit(scores(again, 1, 2), scores(again, 2, request.prompt_len), script.lost(again, 3))
    once_more = (await gateway.queue.wait_for("resubmitted", 2))[1]
    assert once_more.sampling.prompt_logprobs is None  # all are there
    gateway.queue.emit(*script.events(once_more, gateway.ids(" there"), attempt=3))
    choice = (await task).json()["choices"][0]
    assert choice["text"] == "the quick brown fox there"
    assert choice["logprobs"]["token_logprobs"][1:3] == [-0.125, -0.25]


async def test_a_part_of_the_scores_that_is_missing_is_asked_for_again(gateway, script):
    task, request = await gateway.ask(**SCORED)
    plain = without_scores(request)
    gateway.queue.emit(scores(request, 1, 2), *script.events(plain, gateway.ids(" there")))
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert (again.attempt, again.sampling.prompt_logprobs) == (2, 0)
    gateway.queue.emit(scores(again, 1, request.prompt_len), *script.events(plain, gateway.ids(" there"), attempt=2))
    assert (await task).json()["choices"][0]["text"] == "the quick brown fox there"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "logprobs": 3, "return_token_ids": True, "echo": True}),
        ("/v1/completions", {"prompt": ["h\u00e9llo \U0001f600\n" * 9, "the fox"], "n": 2, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_a_whole_answer_is_the_same_in_small_pieces(start, monkeypatch, path, body):
    gateway = await start(max_len=4096)
    gateway.says(TEXT)
    wanted = await gateway.http.post(path, json={**body, "max_tokens": 900})
    assert wanted.status_code == 200
    for name, value in {"PIECE_RECORDS": 7, "PIECE_BYTES": 10, "TAKE_BYTES": 64}.items():
        monkeypatch.setattr(openai_format, name, value)
    monkeypatch.setattr("services.gateway.stream.TAKE_BYTES", 64)
    pieces = await gateway.http.post(path, json={**body, "max_tokens": 900})
    assert pieces.headers["transfer-encoding"] == "chunked"
    assert pieces.headers["content-type"] == "application/json"
    one, other = wanted.json(), pieces.json()
    assert other | {"id": one["id"], "created": one["created"]} == one


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_make_pieces_of_fewer_tokens_not_longer_ones(start, monkeypatch, stream):
    gateway = await start(max_len=4096)
    gateway.says(TEXT)
    parts: list[bytes] = []
    encode = openai_format._encode

    def noted(value: Any) -> bytes:
        parts.append(encode(value))
        return parts[-1]

    monkeypatch.setattr(openai_format, "_encode", noted)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 900}
    answer = await gateway.http.post("/v1/chat/completions", json={**body, "stream": stream})
    assert len(answer.content) > 150_000
    assert max(map(len, parts)) < openai_format.TAKE_BYTES


async def test_a_long_echo_goes_out_in_pieces(start, monkeypatch):
    gateway = await start(max_len=4096)
    gateway.says(TEXT)
    taken: list[bytes] = []

    def noted(pieces: Any) -> bytes:
        taken.extend(found := list(pieces))
        return b"".join(found)

    monkeypatch.setattr("services.gateway.stream._joined", noted)
    monkeypatch.setattr(openai_format, "PIECE_BYTES", 100)
    monkeypatch.setattr(openai_format, "TAKE_BYTES", 200)
    answer = await gateway.http.post("/v1/completions", json={"prompt": "a" * 3000, "echo": True, "max_tokens": 900})
    assert answer.json()["choices"][0]["text"] == "a" * 3000 + TEXT
    assert max(map(len, taken)) < 300


async def test_one_tenants_long_answer_leaves_the_loop_to_others(start, script):
    """While megabytes of log-probabilities are encoded."""
    gateway = await start(max_len=4096)
    ids = gateway.ids("the quick brown fox " * 300)[:1500]
    body = {"prompt": "hello", "n": 48, "logprobs": 20, "max_tokens": 2000}
    long = asyncio.create_task(gateway.http.post("/v1/completions", json=body, timeout=120))
    for request in await gateway.queue.wait_for("admitted", 48):
        gateway.queue.emit(*script.events(request, ids))
        await asyncio.sleep(0.01)
    await eventually(lambda: not len(gateway.table))
    answered = 0
    while not long.done():
        answered += (await gateway.http.get("/health", timeout=60)).status_code == 200
        await asyncio.sleep(0.01)
    assert len((await long).content) > 10_000_000
    assert answered >= 10  # encoded in one go it lets one through at most
