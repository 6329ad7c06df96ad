"""Arguments of tool calls: what a template gets, and what reading hostile ones costs."""

from __future__ import annotations

import json
import time

import pytest

from services.errors import InvalidRequest
from services.gateway.tool_calls import Arguments


@pytest.mark.parametrize(
    "value", [{}, {"a": 1, "b": [True, None, {"c": '[{,\\"'}]}, {"é": 10**30}, {"deep": [[[[[1]]]]]}, {"a": -1.5}]
)
def test_an_object_is_read(value):
    assert Arguments().read(json.dumps(value)) == value
    assert Arguments().read(f" {json.dumps(value, indent=1, ensure_ascii=False)}\n") == value


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}{{ m.name }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.id }} {{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}{% endfor %})"
    "{% endfor %}{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": ["a", 2], "in": "<|bos|>"}'}}
HISTORY = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
    {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "<|eos|>"},
]


async def test_a_conversation_with_calls_goes_through_the_template(start):
    gateway = await start(template=TEMPLATE)
    gateway.says("hello")
    for path, body in (("/v1/chat/completions", {"tools": [], "tool_choice": "none"}), ("/tokenize", {})):
        answer = await gateway.http.post(path, json={"messages": HISTORY, **body})
        assert answer.status_code == 200, answer.text
    expected = '[user]hello[assistant](c1 look at=["a", 2] in="<|bos|>")[toolc1look]<|eos|>'
    tokens = answer.json()["tokens"]
    assert gateway.codec.decode(tokens) == expected
    assert gateway.queue.admitted[0].token_ids == tokens
    assert not {0, 1} & set(tokens), "the client's text holds control tokens"


async def test_a_template_that_fails_on_calls_gives_a_typed_error(start):
    gateway = await start(template=TEMPLATE)
    call = CALL | {"function": {"name": "look", "arguments": "no JSON"}}  # a text has no items
    messages = [{"role": "assistant", "tool_calls": [call]}]
    answer = await gateway.http.post("/v1/chat/completions", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "cannot render these messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["[1]", "no JSON", '{"a": ', "{}}", "]", "1", "null", '"text"', '{"a": 1e999}', f'{{"a": 1{"0" * 5000}}}']
)
def test_what_is_no_object_stays_text(text):
    assert Arguments().read(text) == text


@pytest.mark.parametrize("text", ["", " \n"])
def test_no_text_means_no_arguments(text):
    assert Arguments().read(text) == {}


def test_values_of_all_calls_together_are_bounded():
    arguments = Arguments()
    for _ in range(8_192):
        arguments.read("{}")  # a call, and the object in it
    with pytest.raises(InvalidRequest, match="over 16384 values in all"):
        arguments.read("")
    assert Arguments().read(json.dumps({"a": "[{," * 100_000}))["a"].startswith("[{,"), "text is one value"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a":[' + ",".join(["[]"] * 1_000_000) + "]}", "over 16384 values"),
        ("{" + ",".join(f'"{number}":1' for number in range(400_000)) + "}", "over 16384 values"),
        ('{"a":' + "[" * 10_000 + "]" * 10_000 + "}", "more than 32 levels deep"),
        ("[" * 16_000, "more than 32 levels deep"),
        ('{"a":"' + '\\"' * 2_000_000, None),
        ('"' * 4_000_001, None),
        ("]" * 4_000_000, None),
        ("\\" * 4_000_001, None),
    ],
)
def test_hostile_arguments_are_refused_or_kept_as_text_at_once(text, fault):
    began = time.thread_time()
    if fault is None:
        assert Arguments().read(text) == text
    else:
        with pytest.raises(InvalidRequest, match=fault):
            Arguments().read(text)
    assert time.thread_time() - began < 0.5
