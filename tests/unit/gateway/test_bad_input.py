"""Every wrong body is a 400 that names its field; the server lives on and others are untouched."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading

import httpx
import pytest

URL = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": "hello", "max_tokens": 3}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [1, 2, 400]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, None),
        ({"logit_bias": {"1": 101}}, None),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"x" * 5000: 1}, "x" * 200),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"priority": 10}, "priority"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "stream_options.other"),
    ],
)
async def test_wrong_fields_are_named(gateway, change, param):
    answer = await gateway.http.post(URL, json={**GOOD, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[-1] in error["message"] or param == "prompt"
    assert gateway.queue.admitted == []


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},  # this template refuses it
        {"top_logprobs": 2},
        {"max_completion_tokens": 0},
    ],
)
async def test_wrong_chats(gateway, change):
    answer = await gateway.http.post(CHAT, json={"messages": MESSAGES, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]


async def test_options_stand_in_for_nothing_that_a_template_gets_otherwise(gateway, script):
    names = [f"{kind}_token" for kind in ("bos", "eos", "pad", "unk")]
    names += ["messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"]
    for name in names:
        for value in ("", None, False):
            answer = await gateway.http.post(CHAT, json={"messages": MESSAGES, "chat_template_kwargs": {name: value}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")
    gateway.queue.answer = lambda request: script.events(request, [5])
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


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "text"}, "tools": [], "best_of": 1, "suffix": None, "store": False},
        {"unknown": None},
        {"metadata": {}, "service_tier": "auto", "user": "me"},
    ],
)
async def test_parameters_that_change_nothing_are_taken(gateway, script, extra):
    gateway.queue.answer = lambda request: script.events(request, [5])
    assert (await gateway.http.post(URL, json={**GOOD, **extra})).status_code == 200


async def test_parameters_reach_the_worker(gateway, script):
    gateway.queue.answer = lambda request: script.events(request, [5])
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
    }
    assert (await gateway.http.post(URL, json=body)).status_code == 200
    (request,) = gateway.queue.admitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.2)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -100.0}, (9,))
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (2**63 - 1, 1, True)
    assert (request.priority, request.tenant) == (2, "default")


async def test_a_large_body_is_refused_whole_or_in_pieces(start, script):
    gateway = await start(max_body_bytes=4096)
    big = json.dumps({"prompt": "x" * 10_000_000}).encode()

    async def pieces():
        for at in range(0, len(big), 65536):
            yield big[at : at + 65536]

    for content in (big, pieces()):
        answer = await gateway.http.post(URL, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    gateway.queue.answer = lambda request: script.events(request, [5])
    assert (await gateway.http.post(URL, json=GOOD)).status_code == 200


async def test_a_long_prompt_is_tokenized_in_a_thread(start, script, monkeypatch):
    gateway = await start(max_len=1_000_000)
    gateway.queue.answer = lambda request: script.events(request, [5])
    served = threading.Event()
    encode = gateway.codec.encode

    def wait_and_encode(text: str, **options: bool) -> list[int]:
        assert served.wait(5), "the loop stood still"
        return encode(text, **options)

    monkeypatch.setattr(gateway.codec, "encode", wait_and_encode)
    long = asyncio.create_task(gateway.http.post(URL, json={**GOOD, "prompt": "the fox " * 2_000}))
    await asyncio.sleep(0.02)
    assert (await gateway.http.get("/health")).status_code == 200
    served.set()
    assert (await long).status_code == 200


async def test_a_client_that_asks_first_is_refused_before_it_sends(start):
    gateway = await start(max_body_bytes=4096)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\nExpect: 100-continue\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"\r\nconnection: close\r\n" in answer, "nobody knows whether it will send its body now"
    writer.close()


async def test_a_compressed_body_is_named_as_such(gateway):
    content = gzip.compress(json.dumps(GOOD).encode())
    answer = await gateway.http.post(URL, content=content, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "'gzip'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"stop": ["a"] * 65}, "stop", "length <= 64"),
        ({"stop": 5}, "stop", "`str | array | null`, got `int`"),
        ({"prompt": [-1]}, "prompt", "out of range"),
        ({"prompt": [1.5]}, "prompt", "wrong type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "'image_url'",
        ),
    ],
)
async def test_a_field_of_several_forms_is_refused_for_the_form_that_was_meant(gateway, change, param, says):
    path, body = (CHAT, change) if "messages" in change else (URL, {**GOOD, **change})
    error = (await gateway.http.post(path, json=body)).json()["error"]
    assert error["param"] == param
    assert says in error["message"]


async def test_more_sequences_than_can_ever_wait_are_a_fault_of_the_request(start):
    gateway = await start(max_queued_requests=8)
    for path, body in ((URL, GOOD), (CHAT, {"messages": MESSAGES})):
        answer = await gateway.http.post(path, json={**body, "n": 9})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert gateway.queue.admitted == []


async def test_a_long_text_is_counted_in_a_thread(gateway, monkeypatch):
    """Naming its tokens takes seconds for a text of megabytes; open streams go on meanwhile."""
    served = threading.Event()
    token_text = gateway.codec.token_text

    def wait_and_name(token_id: int) -> str:
        assert served.wait(5), "the loop stood still"
        return token_text(token_id)

    monkeypatch.setattr(gateway.codec, "token_text", wait_and_name)
    body = {"prompt": "fox " * 2000, "return_token_strs": True}
    counting = asyncio.create_task(gateway.http.post("/tokenize", json=body))
    await asyncio.sleep(0.02)
    assert (await gateway.http.get("/health")).status_code == 200
    served.set()
    assert (await counting).json()["token_strs"] == [token_text(token_id) for token_id in gateway.ids("fox " * 2000)]


@pytest.mark.parametrize("tokens", [[5, 400], [-1], [2**31], ["5"]])
async def test_detokenize_knows_the_models_own_tokens_only(gateway, tokens):
    answer = await gateway.http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize("path", ["/v1/nothing", f"{URL}/"])
async def test_unknown_paths_and_methods_have_openai_errors(gateway, path):
    missing = await gateway.http.post(path, json=GOOD)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await gateway.http.get(URL)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("abc-1.2:3_x", "abc-1.2:3_x"), ("a b\x80<script>", "abscript"), ("y" * 300, "y" * 128)],
)
async def test_request_ids_are_echoed_without_what_is_unsafe(gateway, given, shown):
    answer = await gateway.http.get("/health", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert answer.headers["x-request-id"] == shown


async def test_request_ids_are_made_where_there_is_none(gateway):
    ids = {(await gateway.http.get(path)).headers["x-request-id"] for path in ("/health", "/nothing")}
    assert len(ids) == 2


async def test_a_bug_is_a_500_for_its_request_alone(gateway, script, monkeypatch):
    async def broken(*_requests, **_limits):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.queue, "admit", broken)
        answer = await gateway.http.post(URL, json=GOOD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "bug" not in answer.text
    gateway.queue.answer = lambda request: script.events(request, [5])
    assert (await gateway.http.post(URL, json=GOOD)).status_code == 200


async def test_a_client_that_leaves_while_it_sends_disturbs_nobody(gateway, script):
    port = httpx.URL(gateway.url).port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()
    gateway.queue.answer = lambda request: script.events(request, [5])
    assert (await gateway.http.post(URL, json=GOOD)).status_code == 200
