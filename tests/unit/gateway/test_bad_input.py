"""Every wrong body is a 400 that names its field; the server lives on and others are untouched."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from testkit.http_peer import URL, head
from testkit.waiting import eventually

CHAT = "/v1/chat/completions"
GOOD = {"prompt": "hello", "max_tokens": 3}
MESSAGES = [{"role": "user", "content": "hi"}]


WRONG: dict[str, list[Any]] = {
    "max_tokens": ["5", 2.5, -1, 0, True],
    "temperature": [-0.1, "hot"],
    "top_p": [0],
    "repetition_penalty": [5e-324],
    "n": [0, 129],
    "prompt": [[1, 2, 400]],
    "logit_bias": [{"400": 1}, {"x": 1}, {"1": 101}],
    "stop": [""],
    "stop_token_ids": [[400]],
    "min_tokens": [4],
    "priority": [10],
    "speculation": ["on", True],
    "seed": [2**63],
    "logprobs": [21],
    "stream_options": [{"include_usage": True}],
    "best_of": [2],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "json_object"}],
    "temprature": [1],
}
ELSEWHERE = [
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"x" * 5000: 1}, "x" * 200),
    ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "stream_options.other"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # this template refuses it
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_tokens"),
]


async def test_wrong_fields_are_named(gateway):
    for change, param in [*(({name: value}, name) for name, values in WRONG.items() for value in values), *ELSEWHERE]:
        path, body = (CHAT, change) if "messages" in change else (URL, {**GOOD, **change})
        answer = await gateway.http.post(path, json=body)
        assert answer.status_code == 400, change
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), change
        assert param.split(".")[-1] in error["message"] or param in ("prompt", "messages"), change
    assert gateway.queue.admitted == []


async def test_chat_without_a_template_is_refused_with_a_reason(start):
    gateway = await start(template=None)
    answer = await gateway.http.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


async def test_options_stand_in_for_nothing_that_a_template_gets_otherwise(gateway):
    names = [f"{kind}_token" for kind in ("bos", "eos", "pad", "unk")]
    names += ["messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"]
    for name in names:
        for value in ("", None, False):
            answer = await gateway.http.post(CHAT, json={"messages": MESSAGES, "chat_template_kwargs": {name: value}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")
    gateway.says([5])
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False, "range": 1}}
    assert (await gateway.http.post(CHAT, json=body)).status_code == 200
    assert len(gateway.queue.admitted) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'\xef\xbb\xbf{"prompt": "x"}',
        b"[]",
        b"null",
        b"{",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "unknown": NaN}',
        b"[" * 100_000,
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    ],
)
async def test_bytes_that_are_no_request(gateway, raw):
    answer = await gateway.http.post(URL, content=raw)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


async def test_parameters_reach_the_worker(gateway):
    gateway.says([5])
    body = {
        **GOOD,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "logit_bias": {"7": -100},
        "seed": -1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "priority": 2,
        "speculation": "off",
        "user": "me",
    }
    assert (await gateway.http.post(URL, json=body)).status_code == 200
    (request,) = gateway.queue.admitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.2)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -100.0}, (9,))
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (2**63 - 1, 1, True)
    assert (request.priority, request.tenant, sampling.speculation) == (2, "default", "off")


async def test_a_large_body_is_refused_whole_or_in_pieces(start):
    gateway = await start(max_body_bytes=4096)
    gateway.says([5])

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(160):
            yield b"x" * 65536

    for content in (b"x" * 10_000_000, pieces()):
        answer = await gateway.http.post(URL, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert (await gateway.post()).status_code == 200


async def test_a_client_that_asks_first_is_refused_before_it_sends(start):
    gateway = await start(max_body_bytes=4096)
    answer = await (await gateway.connect(head("Content-Length: 9999", "Expect: 100-continue"))).all()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"\r\nconnection: close\r\n" in answer, "nobody knows whether it will send its body now"


async def test_a_compressed_body_is_named_as_such(gateway):
    content = gzip.compress(json.dumps(GOOD).encode())
    answer = await gateway.http.post(URL, content=content, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "'gzip'" in answer.json()["error"]["message"]


async def test_more_sequences_than_can_ever_wait_are_a_fault_of_the_request(start):
    gateway = await start(max_queued_requests=8)
    for path, body in ((URL, GOOD), (CHAT, {"messages": MESSAGES})):
        answer = await gateway.http.post(path, json={**body, "n": 9})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert gateway.queue.admitted == []


@pytest.mark.parametrize(
    ("path", "method", "more"),
    [(URL, "encode", {"max_tokens": 3}), ("/tokenize", "token_text", {"return_token_strs": True})],
)
async def test_a_long_text_is_tokenized_and_its_tokens_are_named_in_a_thread(start, monkeypatch, path, method, more):
    """Both take seconds for a text of megabytes; open streams go on meanwhile."""
    gateway = await start(max_len=1_000_000)
    gateway.says([5])
    names = [gateway.codec.token_text(token_id) for token_id in gateway.ids("the fox " * 2_000)]
    began, served, work = threading.Event(), threading.Event(), getattr(gateway.codec, method)

    def wait_and_work(*arguments: Any, **options: bool) -> Any:
        began.set()
        assert served.wait(20), "the loop stood still"
        return work(*arguments, **options)

    monkeypatch.setattr(gateway.codec, method, wait_and_work)
    long = asyncio.create_task(gateway.http.post(path, json={"prompt": "the fox " * 2_000} | more))
    await eventually(began.is_set)
    assert (await gateway.http.get("/health")).status_code == 200
    served.set()
    answer = await long
    assert answer.status_code == 200
    if path == "/tokenize":
        assert answer.json()["token_strs"] == names


@pytest.mark.parametrize("tokens", [[5, 400], [-1], [2**31], ["5"]])
async def test_detokenize_knows_the_models_own_tokens_only(gateway, tokens):
    answer = await gateway.http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


async def test_unknown_paths_and_methods_have_openai_errors(gateway):
    for path in ("/v1/nothing", f"{URL}/"):
        missing = await gateway.http.post(path, json=GOOD)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await gateway.http.get(URL)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("abc-1.2:3_x", "abc-1.2:3_x"), ("a b\x80<script>", "abscript"), ("y" * 300, "y" * 64)],
)
async def test_request_ids_are_echoed_without_what_is_unsafe(gateway, given, shown):
    answer = await gateway.http.get("/health", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert answer.headers["x-request-id"] == shown
    made = {(await gateway.http.get(path)).headers["x-request-id"] for path in ("/health", "/nothing")}
    assert len(made) == 2, "where there is none, one is made"


async def test_a_bug_is_a_500_for_its_request_alone(gateway, monkeypatch):
    async def broken(*_requests, **_limits):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.queue, "admit", broken)
        answer = await gateway.http.post(URL, json=GOOD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "bug" not in answer.text
    gateway.says([5])
    assert (await gateway.http.post(URL, json=GOOD)).status_code == 200
