"""The official ``openai`` client against a real server: what its users do, and what they see when it fails."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from testkit.processes.servers import Server

CHAT = [{"role": "user", "content": "Grüße, 世界! Tell me about lighthouses."}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_streamed_completion_equals_whole_completion(client: openai.OpenAI) -> None:
    args = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**args)
    chunks = list(client.completions.create(**args, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in finishes if reason] == [whole.choices[0].finish_reason]
    assert whole.usage.prompt_tokens == len("Once upon a time")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI) -> None:
    args = {"model": "tiny", "messages": CHAT, "max_tokens": 32, "temperature": 0.7, "seed": 11}
    whole = client.chat.completions.create(**args)
    stream = list(client.chat.completions.create(**args, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"


def test_same_seed_same_text_other_seed_other_text(client: openai.OpenAI) -> None:
    args = {"model": "tiny", "prompt": "dice", "max_tokens": 24, "temperature": 1}
    first, again, other = (client.completions.create(**args, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_choices_of_one_request_differ_and_are_indexed(client: openai.OpenAI) -> None:
    result = client.completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=16, temperature=1, seed=5)
    assert [choice.index for choice in result.choices] == list(range(6))
    assert len({choice.text for choice in result.choices}) == 6
    alone = client.completions.create(model="tiny", prompt="a", n=3, max_tokens=16, temperature=1, seed=5)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in result.choices[:3]]


def test_logprobs_of_completion_describe_the_greedy_tokens(client: openai.OpenAI) -> None:
    result = client.completions.create(model="tiny", prompt="measure", max_tokens=8, temperature=0, logprobs=3)
    logprobs = result.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()))
        assert len(top) >= 1


def test_echo_returns_prompt_and_its_logprobs(client: openai.OpenAI) -> None:
    result = client.completions.create(model="tiny", prompt="echo!", max_tokens=2, temperature=0, echo=True, logprobs=1)
    choice = result.choices[0]
    assert choice.text.startswith("echo!")
    assert len(choice.logprobs.token_logprobs) == len("echo!") + 2
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    scored = client.completions.create(model="tiny", prompt="echo!", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "echo!"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    result = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    content = result.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) for entry in content)


def test_stop_string_across_token_borders_is_cut(client: openai.OpenAI) -> None:
    args = {"model": "tiny", "prompt": "find the end", "max_tokens": 60, "temperature": 0}
    full = client.completions.create(**args, extra_body={"ignore_eos": True}).choices[0].text
    stop = full[20:24]
    cut = client.completions.create(**args, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert cut.text == full[: full.index(stop)]
    assert cut.finish_reason == "stop"
    stream = client.completions.create(**args, stop=[stop], stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_logit_bias_forces_a_token(client: openai.OpenAI, server: Server) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": "Z"}).json()["tokens"]
    result = client.completions.create(
        model="tiny", prompt="bias", max_tokens=5, temperature=0, logit_bias={str(ids[-1]): 100}
    )
    assert result.choices[0].text == "ZZZZZ"


@pytest.mark.parametrize(("presence", "frequency"), [(2, 0), (0, 2), (-1, 0.5)])
def test_penalties_choose_what_they_say(client: openai.OpenAI, presence: float, frequency: float) -> None:
    """Log-probabilities are those before penalties, so each token of the answer can be worked out from them."""
    args: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
    more = {"ignore_eos": True, "return_token_ids": True}
    plain = client.completions.create(**args, prompt=[65, 66], extra_body=more).choices[0]
    found = client.completions.create(
        **args, prompt=[65, 66], presence_penalty=presence, frequency_penalty=frequency, extra_body=more
    ).choices[0]
    assert found.text != plain.text
    args |= {"max_tokens": 0, "echo": True, "logprobs": 20}
    scores = client.completions.create(**args, prompt=[65, 66, *found.token_ids]).choices[0].logprobs
    said: list[str] = []
    for token, top in zip(scores.tokens[2:], scores.top_logprobs[2:], strict=True):
        penalised = {t: logprob - presence * (t in said) - frequency * said.count(t) for t, logprob in top.items()}
        assert penalised[token] == pytest.approx(max(penalised.values()), abs=1e-4)
        said.append(token)


def test_filters_and_the_repetition_penalty_reach_the_answer(client: openai.OpenAI) -> None:
    def distinct(**options: Any) -> tuple[str, int]:
        body = {"ignore_eos": True, "return_token_ids": True} | options
        args = {"temperature": body.pop("temperature", 0), "max_tokens": 24}
        choice = client.completions.create(model="tiny", prompt=[65, 66], extra_body=body, **args).choices[0]
        return choice.text, len(set(choice.token_ids))

    text, tokens = distinct()
    assert distinct(temperature=2, top_k=1) == distinct(temperature=2, min_p=1) == (text, tokens)
    assert distinct(repetition_penalty=10)[1] > tokens


def test_tokenize_round_trip(server: Server) -> None:
    text = "naïve — 世界 🚢"
    ids = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": ids}).json()["prompt"] == text


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="tiny", prompt="x" * 600, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="tiny", prompt="")


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "JSON"),
        (b'{"model": "tiny", "prompt": [999999]}', 400, "prompt"),
        (b'{"model": "tiny", "prompt": "x", "warp": 9}', 400, "warp"),
        (b"", 400, ""),
        (b'{"model": "tiny", "prompt": "' + b"x" * 10_000_000 + b'"}', 413, "bytes"),
    ],
    ids=["number", "surrogate", "token", "field", "nothing", "size"],
)
def test_bad_bodies_get_an_openai_shaped_error(server: Server, body: bytes, status: int, says: str) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": "bad-body-1"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in json.dumps(error)
    assert response.headers["X-Request-Id"] == "bad-body-1"
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_idempotency_key_replays_and_refuses_another_body(server: Server) -> None:
    def post(prompt: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 1}
        return httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"Idempotency-Key": "order-66"}, timeout=60
        )

    first, again = post("same"), post("same")
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert post("other").status_code == 409


def test_health_ready_version_docs_and_metrics_with_a_bounded_number_of_series(server: Server) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200, path
    assert server.metric("expertmesh_generation_tokens_total") > 0
    assert server.metric("expertmesh_decode_tokens_total") > 0
    assert server.metric("expertmesh_expert_tokens_total") > 0
    page = httpx.get(f"{server.url}/metrics").text
    series = Counter(re.findall(r'^expertmesh_[^{]*\{role="([a-z]+)"', page, re.MULTILINE))
    assert set(series) >= {"gateway", "scheduler", "attention"}
    assert max(series.values()) < 600, series
