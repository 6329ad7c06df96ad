"""The OpenAI surface, through the official client and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import msgspec
import openai
import pytest
from testkit.http_peer import post
from testkit.queue.scripted import ScriptedQueue
from testkit.waiting import eventually

from services.errors import AttemptsExhausted, QueueFull, QueueUnavailable
from services.gateway.app import build_metrics_app
from services.messages import GenerateRequest, TokenEvent, TokenLogprob, WorkerInfo

ASK = {"model": "tiny", "prompt": "hello"}


async def test_completion_through_the_official_client(gateway):
    token_ids = gateway.says("the quick fox — 你好!")
    ask = {"model": "tiny", "prompt": "hello world", "max_tokens": 50, "temperature": 0}
    answer = await gateway.openai.completions.create(**ask, extra_body={"return_token_ids": True})
    assert answer.choices[0].text == "the quick fox — 你好!"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].token_ids == token_ids
    assert answer.usage.completion_tokens == len(token_ids)
    assert answer.usage.prompt_tokens == len(gateway.ids("hello world"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    request = gateway.queue.admitted[0]
    assert request.token_ids == gateway.ids("hello world")
    assert request.sampling.max_tokens == 50
    assert request.reply_to == "gw"
    await gateway.openai.completions.create(**ask)
    assert gateway.queue.admitted[1].sampling.seed != request.sampling.seed, "a missing seed is drawn each time"


async def test_chat_stream_opens_with_the_role_and_renders_the_template(gateway):
    gateway.says("Hello there!", finish="stop")
    stream = await gateway.openai.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        stream=True,
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    # The token that ends a sequence shows no text.
    assert "".join(delta.content or "" for delta in deltas) == gateway.codec.decode(gateway.ids("Hello there!")[:-1])
    prompt = gateway.codec.decode(gateway.queue.admitted[0].token_ids)
    assert prompt == "<|bos|>[system]be brief\n[user]hi\n[assistant]"
    assert gateway.queue.admitted[0].sampling.max_tokens == 256 - len(gateway.queue.admitted[0].token_ids)


async def test_each_token_of_a_live_stream_is_sent_when_it_comes(gateway, script):
    peer = await gateway.connect(post({**ASK, "stream": True}))
    (request,) = await gateway.queue.wait_for("admitted")
    token_ids = gateway.ids("one two three")
    for event in script.events(request, token_ids):
        gateway.queue.emit(event)
        chunk = json.loads((await peer.until(b"}\n\n")).partition(b"data: ")[2])
        assert chunk["choices"][0]["text"] == gateway.codec.decode([event.token_id])


@pytest.mark.parametrize("prompts", [["one", "two"], [[72, 73], [74]]])
async def test_batches_and_n_are_one_sequence_each_in_order(gateway, script, prompts):
    gateway.queue.answer = lambda request: script.events(request, gateway.ids(f"s{request.id[-1]}"))
    answer = await gateway.openai.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=9, seed=7)
    first, second = (gateway.ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)
    assert [request.token_ids for request in gateway.queue.admitted] == [first, first, second, second]
    assert [choice.text for choice in answer.choices] == ["s0", "s1", "s2", "s3"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    samplings = [request.sampling for request in gateway.queue.admitted]
    assert [(sampling.seed, sampling.choice) for sampling in samplings] == [(7, 0), (7, 1), (7, 0), (7, 1)]
    assert answer.usage.prompt_tokens == len(first) + len(second)


@pytest.mark.parametrize("as_text", [True, False])
async def test_echoed_offsets_count_special_tokens_as_far_as_the_text_shows_them(gateway, as_text):
    """They are spelled out where the client gave ids, or wrote them."""
    spelled = "<|bos|>the fox<|eos|>dog"
    gateway.says("!")
    prompt = spelled if as_text else gateway.ids(spelled)
    body = {**ASK, "prompt": prompt, "echo": True, "logprobs": 0}
    choice = (await gateway.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == f"{spelled}!"
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


async def test_echo_of_a_prompt_with_nothing_generated(gateway, script):
    gateway.queue.answer = lambda request: [
        msgspec.structs.replace(event, token_id=None, logprob=None) for event in script.events(request, [5])
    ]
    answer = (await gateway.post(echo=True, logprobs=0, max_tokens=0)).json()
    assert answer["choices"][0]["text"] == "hello"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(gateway.ids("hello"))
    assert answer["usage"]["completion_tokens"] == 0


async def test_chat_logprobs_carry_bytes(gateway):
    token_ids = gateway.says("é!")
    answer = await gateway.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=5,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == len(token_ids)
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "é!"
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content)


async def test_infinite_logprobs_are_valid_json(gateway, script):
    never = TokenLogprob(float("-inf"), [(5, float("-inf"))])
    gateway.queue.answer = lambda request: [
        msgspec.structs.replace(event, logprob=never) for event in script.events(request, [5])
    ]
    body = (await gateway.post(logprobs=1)).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize(
    ("says_", "stop", "shown"),
    [
        ("the quick brown fox", ["k bro", "zzz"], "the quic"),
        ("naïve 🙂 end", ["🙂"], "naïve "),
        ("naïve 🙂🙃 end", ["🙃 e", "🙃x"], "naïve 🙂"),
        ("a\0b\ufeffc end", ["\0b"], "a"),
        ("a\0b\ufeffc end", ["\ufeff"], "a\0b"),
        ("e\u0301 é end", ["é"], "e\u0301 "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens_ends_and_cancels_upstream(gateway, says_, stop, shown, stream):
    """The tokens hold parts of characters, and what is not normalised is not the same."""
    gateway.says(says_, finish=None)  # the worker goes on
    found = await gateway.openai.completions.create(model="tiny", prompt="hi", max_tokens=99, stop=stop, stream=stream)
    choices = [chunk.choices[0] async for chunk in found] if stream else found.choices
    assert "".join(choice.text for choice in choices) == shown
    assert choices[-1].finish_reason == "stop"
    await gateway.queue.wait_for("cancelled")
    assert set(gateway.queue.cancelled) == {gateway.queue.admitted[0].id}


async def test_max_tokens_and_context_errors_name_both_numbers(gateway):
    with pytest.raises(openai.BadRequestError) as raised:
        await gateway.openai.completions.create(model="tiny", prompt="hello", max_tokens=1000)
    assert raised.value.code == "context_length_exceeded"
    assert "256" in raised.value.message
    assert str(1000 + len(gateway.ids("hello"))) in raised.value.message


@pytest.mark.parametrize(
    ("length", "max_tokens", "more", "status"),
    [
        (255, 1, {}, 200),
        (255, None, {}, 200),
        (255, 2, {}, 400),
        (256, 0, {"echo": True}, 200),
        (256, 1, {}, 400),
        (256, None, {}, 400),
        (257, 0, {"echo": True}, 400),
    ],
)
async def test_a_prompt_may_fill_the_context_but_for_what_is_generated(gateway, length, max_tokens, more, status):
    gateway.says("x")
    body = {"prompt": [5] * length, "max_tokens": max_tokens} | more
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == status
    if status == 200:
        assert gateway.queue.admitted[0].sampling.max_tokens == (1 if max_tokens is None else max_tokens)
    else:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_shortest_worker_bounds_the_context(start):
    what = {"id": "w", "model": "tiny", "fingerprint": "f", "host": "h", "pid": 1, "version": "1"}
    queue = ScriptedQueue()
    queue.live_workers = [WorkerInfo(**what, kv_tokens=64, max_num_seqs=1, max_model_len=20)]
    gateway = await start(queue=queue)
    answer = await gateway.post(max_tokens=20)
    assert answer.status_code == 400
    assert "holds 20" in answer.json()["error"]["message"]


async def test_errors_reach_the_official_client_as_its_exceptions(gateway):
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.completions.create(model="other", prompt="hi")
    gateway.queue.refusal = QueueFull("The queue is full.", retry_after_s=500)
    with pytest.raises(openai.RateLimitError) as raised:
        await gateway.openai.completions.create(model="tiny", prompt="hi")
    assert raised.value.response.headers["retry-after"] == "120"
    gateway.queue.refusal = QueueUnavailable("Redis is away.")
    with pytest.raises(openai.InternalServerError) as unavailable:
        await gateway.openai.completions.create(model="tiny", prompt="hi")
    assert unavailable.value.status_code == 503
    assert unavailable.value.response.headers["retry-after"] == "1"


def failure(request: GenerateRequest) -> TokenEvent:
    error = AttemptsExhausted("It failed three times.").info()
    return TokenEvent(request_id=request.id, attempt=1, index=0, finish="error", error=error)


async def test_an_error_before_the_first_token_has_its_status(gateway):
    gateway.queue.answer = lambda request: [failure(request)]
    for stream in (False, True):
        answer = await gateway.http.post("/v1/completions", json={**ASK, "stream": stream})
        assert answer.status_code == 503
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "attempts_exhausted"


async def test_an_error_in_mid_stream_is_an_event_that_raises(gateway, script):
    task = asyncio.create_task(gateway.openai.completions.create(model="tiny", prompt="hi", stream=True))
    request = (await gateway.queue.wait_for("admitted"))[0]
    gateway.queue.emit(*script.events(request, gateway.ids("the fox"), finish=None))
    stream = await task
    gateway.queue.emit(failure(request))
    with pytest.raises(openai.APIError, match="failed three times"):
        async for _ in stream:
            pass


async def test_one_failed_choice_fails_the_request_and_cancels_the_others(gateway, script):
    def answer(request):
        return script.events(request, [5], finish=None) if request.id.endswith("-0") else [failure(request)]

    gateway.queue.answer = answer
    assert (await gateway.post(n=2)).status_code == 503
    await gateway.queue.wait_for("cancelled")
    assert set(gateway.queue.cancelled) == {gateway.queue.admitted[0].id}
    assert len(gateway.table) == 0


async def test_models_tokenizer_and_operations(gateway):
    models = (await gateway.http.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["tiny"]
    assert (await gateway.http.get("/v1/models/tiny")).json()["max_model_len"] == 256
    assert (await gateway.http.get("/v1/models/org/other")).status_code == 404
    tokens = (await gateway.http.post("/tokenize", json={"prompt": "\ufeffhéllo\0", "return_token_strs": True})).json()
    assert tokens["tokens"] == gateway.ids("\ufeffhéllo\0")
    assert tokens["count"] == len(tokens["token_strs"])
    text = (await gateway.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "\ufeffhéllo\0"}
    chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    ids = (await gateway.http.post("/tokenize", json=chat)).json()["tokens"]
    assert gateway.codec.decode(ids) == "<|bos|>[user]x\n"
    info = (await gateway.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|eos|>"
    assert "messages" in info["chat_template"]
    assert (await gateway.http.get("/version")).json() == {"version": "1.2.3"}
    assert (await gateway.http.get("/health")).json() == {"status": "ok"}


@pytest.mark.night
async def test_lm_eval_takes_the_server_for_a_remote_tokenizer(gateway):
    utils = pytest.importorskip("lm_eval.utils")

    assert await asyncio.to_thread(utils.check_remote_tokenizer_support, f"{gateway.url}/v1/completions")


async def test_ready_names_what_is_missing(gateway):
    gateway.leader.led = False
    answer = await gateway.http.get("/ready")
    assert answer.status_code == 503
    assert "scheduler, worker" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    gateway.queue.down = True
    await eventually(lambda: not gateway.follower.up)
    assert "redis" in (await gateway.http.get("/ready")).json()["error"]["message"]
    assert (await gateway.http.get("/health")).status_code == 200


async def test_metrics_on_a_port_of_their_own_are_on_no_other(start):
    gateway = await start(separate_metrics=True)
    assert (await gateway.http.get("/metrics")).status_code == 404
    separate = httpx.ASGITransport(app=build_metrics_app(gateway.parts))
    async with httpx.AsyncClient(transport=separate, base_url="http://separate") as http:
        assert "expertmesh_gateway_requests_in_flight 0.0" in (await http.get("/metrics")).text
        assert (await http.get("/v1/models")).status_code == 404


async def test_metrics_count_what_clients_saw(gateway):
    gateway.says("the fox")
    await gateway.http.post("/v1/completions", json=ASK)
    page = (await gateway.http.get("/metrics")).text
    assert 'expertmesh_http_requests_total{route="/v1/completions",status="200"} 1.0' in page
    assert 'expertmesh_requests_total{finish="length"} 1.0' in page
    assert f"expertmesh_generation_tokens_total {float(len(gateway.ids('the fox')))}" in page
    assert "expertmesh_time_to_first_token_seconds_count 1.0" in page
    assert "expertmesh_gateway_requests_in_flight 0.0" in page


def series(gateway: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    samples = (sample for family in gateway.registry.collect() for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}


async def test_nothing_that_clients_send_makes_a_series_of_its_own(gateway):
    gateway.says("x")

    async def press(word: str) -> None:
        headers = {"User-Agent": word, "X-Request-Id": word, "Authorization": f"Bearer {word}", "Host": word}
        for method, path in (("GET", f"/{word}"), ("GET", f"/v1/models/{word}"), (word.upper(), "/health")):
            await gateway.http.request(method, path, headers=headers)
        body = {"prompt": word, "user": word, "cache_salt": word}
        for more in ({}, {"model": word}, {word: 1}, {"stop": word, "seed": len(word)}, {"n": 999}):
            await gateway.http.post(f"/v1/completions?{word}={word}", json=body | more, headers=headers)

    for word in ("patch", "no-method"):
        await press(word)
    before = series(gateway)
    for word in ("put", "delete", "abc", "defg"):
        await press(word)
    assert series(gateway) == before
    assert len(before) < 400


async def test_an_idle_stream_shows_a_sign_of_life(gateway, script):
    peer = await gateway.connect(post({**ASK, "stream": True}))
    (request,) = await gateway.queue.wait_for("admitted")
    first, second = script.events(request, gateway.ids("ab"))
    gateway.queue.emit(first)
    assert (await peer.until(b"}\n\n")).count(b"data: ") == 1
    for job in gateway.table.jobs():
        job.poke()
    assert b"data: " not in await peer.until(b": wait")
    gateway.queue.emit(second)
    assert (await peer.until(b"[DONE]")).count(b"data: ") == 2


async def test_few_hundred_streams_are_woken_in_one_turn_of_the_loop(gateway, monkeypatch):
    poked = []

    class Idle:
        def poke(self) -> None:
            poked.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(gateway.table, "jobs", lambda: [Idle() for _ in range(600)])
        patched.setattr(gateway.follower, "_poked_at", float("-inf"))
        counts = [len(poked) for _ in gateway.follower._keep_alive().__await__()]
    assert (counts, len(poked)) == ([256, 512], 600)


async def test_a_long_path_is_cut_in_the_log(gateway, caplog):
    with caplog.at_level(logging.INFO, logger="services.gateway.middleware"):
        assert (await gateway.http.get("/" + "x" * 5000)).status_code == 404
    assert [len(record.path) for record in caplog.records if hasattr(record, "path")] == [512]


async def test_messages_become_control_tokens_on_request_alone(gateway):
    gateway.says("ok")
    eos = gateway.codec.tokenizer.token_to_id("<|eos|>")
    chat: dict[str, object] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a<|eos|>b"}]}]}
    for more, found in (({}, 0), ({"parse_special_tokens": False}, 0), ({"parse_special_tokens": True}, 1)):
        ids = (await gateway.http.post("/tokenize", json=chat | more)).json()["tokens"]
        assert ids.count(eos) == found
        assert gateway.codec.decode(ids) == "<|bos|>[user]a<|eos|>b\n[assistant]"
        await gateway.http.post("/v1/chat/completions", json=chat | more)
        assert gateway.queue.admitted[-1].token_ids == ids
    raw = {"prompt": "a<|eos|>b"}
    assert (await gateway.http.post("/tokenize", json=raw)).json()["tokens"].count(eos) == 1
    await gateway.http.post("/v1/completions", json=raw)
    assert gateway.queue.admitted[-1].token_ids.count(eos) == 1


async def test_a_cache_salt_goes_along_with_the_request(gateway):
    gateway.says("ok")
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for path, needed in (("completions", "prompt"), ("chat/completions", "messages")):
        for salt, sent in (({}, ""), ({"cache_salt": "s" * 256}, "s" * 256), ({"cache_salt": None}, "")):
            answer = await gateway.http.post(f"/v1/{path}", json={needed: body[needed], "max_tokens": 2} | salt)
            assert answer.status_code == 200
            assert gateway.queue.admitted[-1].cache_salt == sent
        for salt in ("", "s" * 257, 5):
            refused = await gateway.http.post(f"/v1/{path}", json={needed: body[needed], "cache_salt": salt})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
