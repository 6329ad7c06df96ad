"""A stream says of each sequence what a whole answer says, however their tokens mix and where its events are cut."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from itertools import zip_longest
from typing import Any

import pytest

from services.gateway import openai_format

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = ["the quick STOP fox", "naïve 🙂 over", "hello", "STOP", "the lazy dog ends with ST", "there OP STOP STOP"]
CHATS: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CASES = {
    "n": (COMPLETIONS, {"prompt": "hello", "n": 3}),
    "prompts": (COMPLETIONS, {"prompt": ["hello", "the fox"], "n": 3}),
    "ids and scores": (COMPLETIONS, {"prompt": [[72, 73], [74]], "n": 2, "logprobs": 2, "return_token_ids": True}),
    "echo": (COMPLETIONS, {"prompt": ["hello", "é🙂"], "n": 2, "echo": True, "logprobs": 0, "return_token_ids": True}),
    "long echo": (COMPLETIONS, {"prompt": ["h\u00e9llo \U0001f600\n" * 9], "n": 1, "echo": True}),
    "stop": (COMPLETIONS, {"prompt": ["hello", "the fox"], "n": 3, "stop": ["STOP"]}),
    "chat": (CHAT, CHATS | {"n": 3}),
    "chat with scores": (CHAT, CHATS | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat with stop": (CHAT, CHATS | {"n": 6, "stop": "STOP"}),
}


async def ask(gateway: Any, script: Any, path: str, body: dict[str, Any]) -> str:
    """The answer to ``body``, whose sequences get a token each in turn."""
    first, count = len(gateway.queue.admitted), body["n"]
    prompts = body.get("prompt", "")
    count *= len(prompts) if isinstance(prompts, list) else 1
    asking = asyncio.create_task(gateway.http.post(path, json=body | {"max_tokens": 60, "seed": 7}))
    requests = (await gateway.queue.wait_for("admitted", first + count))[first:]
    for events in zip_longest(*(script.events(r, gateway.ids(SAID[i])) for i, r in enumerate(requests))):
        gateway.queue.emit(*(event for event in events if event is not None))
        await asyncio.sleep(0.001)
    answer = await asking
    assert answer.status_code == 200, answer.text
    return answer.text


def joined(parts: list[Any]) -> Any:
    """Values of a choice's events, put together as in a whole answer."""
    parts = [part for part in parts if part is not None]
    if not parts or isinstance(parts[0], int):
        return parts[0] if parts else None
    if isinstance(parts[0], dict):
        names = {name: None for part in parts for name in part}
        return {name: joined([part.get(name) for part in parts]) for name in names}
    return sum(parts[1:], start=parts[0])


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]


def assert_they_say(chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        choices[choice.pop("index")].append(choice)
    assert sorted(choices) == list(range(len(whole["choices"])))
    for index, wanted in enumerate(whole["choices"]):
        events = choices[index]
        finishes = [event["finish_reason"] for event in events]
        assert finishes == [None] * (len(events) - 1) + [wanted["finish_reason"]]
        if "message" in wanted:
            assert [event["delta"].pop("role", None) for event in events] == ["assistant"] + [None] * (len(events) - 1)
            text = "".join(event["delta"].get("content", "") for event in events)
            assert text == wanted["message"]["content"]
            assert set().union(*(event["delta"] for event in events)) == {"content"}
        else:
            assert "".join(event["text"] for event in events) == wanted["text"]
        for name in ("logprobs", "token_ids"):
            assert joined([event.get(name) for event in events]) == wanted.get(name)


@pytest.mark.parametrize(("path", "body"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("usage", [True, False])
async def test_each_choice_of_a_stream_is_that_of_the_whole_answer(gateway, script, path, body, usage):
    whole = json.loads(await ask(gateway, script, path, body))
    stops = ["stop" in body and "STOP" in said for said in SAID[: len(whole["choices"])]]
    assert [choice["finish_reason"] == "stop" for choice in whole["choices"]] == stops
    if "return_token_ids" in body:  # those that are generated, with an echo as well
        assert [choice["token_ids"] for choice in whole["choices"]] == list(map(gateway.ids, SAID[: len(stops)]))
    asked = body | {"stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    chunks = chunks_of(await ask(gateway, script, path, asked))
    if usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert [chunk.get("usage", "none") for chunk in chunks] == [None if usage else "none"] * len(chunks)
    assert_they_say(chunks, whole)


@pytest.mark.parametrize(("path", "body"), [CASES["prompts"], CASES["chat"]], ids=["prompts", "chat"])
async def test_each_chunk_has_the_counts_so_far_where_they_are_wanted(gateway, script, path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await ask(gateway, script, path, body | {"stream": True, "stream_options": options}))
    final = chunks[-1]["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[len(counts) // 2] < counts[-1] == final["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {final["prompt_tokens"]}


@pytest.mark.parametrize(("path", "body"), CASES.values(), ids=CASES)
async def test_a_long_answer_is_the_same_in_small_events(start, monkeypatch, path, body):
    gateway = await start(max_len=4096)
    gateway.says("the quick brown fox — 你好! " * 12)
    body = body | {"max_tokens": 900, "seed": 7}
    whole = (await gateway.http.post(path, json=body)).json()
    usual = chunks_of((await gateway.http.post(path, json=body | {"stream": True})).text)
    for name, value in {"PIECE_RECORDS": 5, "PIECE_BYTES": 10, "TAKE_BYTES": 64}.items():
        monkeypatch.setattr(openai_format, name, value)
    monkeypatch.setattr("services.gateway.stream.TAKE_BYTES", 64)
    small = chunks_of((await gateway.http.post(path, json=body | {"stream": True})).text)
    assert len(small) > 3 * len(usual)
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert_they_say(small, whole)
