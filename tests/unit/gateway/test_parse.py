"""Bodies from bytes: what a wrong one costs, and which of them mean the same."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from array import array
from typing import Any

import pytest
from testkit.processes.hostile_bodies import SIZE, hostile_bodies

from services.errors import InvalidRequest, UnsupportedParameter
from services.gateway.parse import Parser
from services.gateway.schema import NO_OPS, UNUSED, ChatBody, CompletionBody, DetokenizeBody

PARSERS: dict[str, Parser[Any]] = {
    "/v1/completions": Parser(CompletionBody),
    "/v1/chat/completions": Parser(ChatBody),
    "/detokenize": Parser(DetokenizeBody),
}
COMPLETION, CHAT = PARSERS["/v1/completions"], PARSERS["/v1/chat/completions"]
BODIES = hostile_bodies()
SECONDS = 0.5
"""Of the interpreter's lock, which the event loop waits for: thrice what the slowest takes on an idle core."""


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_costs_no_more_than_a_right_one(name):
    path, raw, param = BODIES[name]
    assert SIZE * 0.99 < len(raw) <= SIZE
    gc.freeze()  # what other tests of this process have left is not searched for rubbish
    try:
        began = time.thread_time()
        with pytest.raises(InvalidRequest) as refused:
            PARSERS[path].parse(raw)
        took = time.thread_time() - began
    finally:
        gc.unfreeze()
    assert took < SECONDS
    assert refused.value.param == param
    assert len(refused.value.message) < 1000


_MEMORY = """
    import resource, sys
    from testkit.processes.hostile_bodies import hostile_bodies
    from services.errors import InvalidRequest
    from services.gateway.parse import Parser
    from services.gateway.schema import ChatBody, CompletionBody, DetokenizeBody

    parsers = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/detokenize": DetokenizeBody}
    for name, (path, raw, _) in hostile_bodies().items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            Parser(parsers[path]).parse(raw)
        except InvalidRequest:
            pass
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        assert grown < 100, f"{name}: {grown} MiB"
    raw = b'{"prompt":[' + b",".join([b"300"] * 1_048_000) + b"]}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(Parser(CompletionBody).parse(raw).prompts[0]) == 1_048_000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < 120, f"a million ids: {grown} MiB"
"""


def test_a_wrong_body_takes_no_memory_but_its_own():
    """In a process of its own, whose peak is nobody else's."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(_MEMORY)], env=os.environ | paths, check=True)


@pytest.mark.parametrize("name", ["logit_bias", "chat_template_kwargs"])
def test_a_large_map_is_not_built_to_be_counted(name):
    body = {"messages": [{"role": "user", "content": "x"}], name: {str(number): 1 for number in range(8_000)}}
    with pytest.raises(InvalidRequest, match=f"{name} exceeds 65536 bytes"):
        CHAT.parse(json.dumps(body).encode())


def test_two_million_ids_are_read_fast():
    raw = b'{"prompt":[' + b",".join([b"5"] * 2_097_000) + b"]}"
    began = time.thread_time()
    assert len(COMPLETION.parse(raw).prompts[0]) == 2_097_000
    assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", ["hi"]),
        ("[1]", ["[1]"]),
        ('"', ['"']),
        (["a", "[b"], ["a", "[b"]),
        ([7, 8], [[7, 8]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ],
)
@pytest.mark.parametrize("indent", [None, "\t\r"])
def test_a_prompt_is_what_its_first_element_is(given, prompts, indent):
    found = COMPLETION.parse(json.dumps({"prompt": given}, indent=indent).encode()).prompts
    assert [prompt if isinstance(prompt, str) else prompt.tolist() for prompt in found] == prompts


WRONG_PROMPTS: dict[str, list[Any]] = {
    "empty": ["", [], [""], [[]], [[1], []]],
    "wrong type": [["a", 1], [1, "a"], [[1], "a"], [[1], 2], [[["a"]]], [1.0], [1.5], [True], [None], 5, None, {}],
    "out of range": [[-1], [2**31], [[2**64]]],
    "over 1024": [["a"] * 1025, [[1]] * 1025],
}


@pytest.mark.parametrize("says", WRONG_PROMPTS)
def test_a_wrong_prompt_is_refused_with_its_fault(says):
    for given in WRONG_PROMPTS[says]:
        with pytest.raises(InvalidRequest, match=says) as refused:
            COMPLETION.parse(json.dumps({"prompt": given}).encode())
        assert refused.value.param == "prompt", given


def test_what_changes_nothing_is_taken_wherever_it_stands():
    message = {"role": "assistant", "content": [{"type": "text", "text": "x", "more": None}], "refusal": None}
    body = CHAT.parse(json.dumps({"messages": [message] * 3, "stream_options": {"other": None}, "odd": None}).encode())
    assert [found.as_template_input()["content"] for found in body.messages] == ["x"] * 3
    for name, values in NO_OPS.items():
        for value in values:
            assert COMPLETION.parse(json.dumps({"prompt": "x", name: value}).encode()).prompt == "x"
        with pytest.raises(UnsupportedParameter) as refused:
            COMPLETION.parse(json.dumps({"prompt": "x", name: "other"}).encode())
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages.0"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages.0"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0.function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
            "messages.0.tool_calls.0.type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "odd": 1}]}],
            "messages.0.tool_calls.0.odd",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "odd": 1}}]}],
            "messages.0.tool_calls.0.function.odd",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages.0.function_call"),
        ([{"role": "assistant", "thinking": "so"}], "messages.0.thinking"),
        ([{"role": "user"}, {"role": "user", "odd": 1}], "messages.1.odd"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}], "messages.0.content.1.text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]}], "messages.0.content.0.odd"),
        ([{"role": "user", "odd": None, "content": [{"type": "audio", "text": ""}]}], "messages.0.content.0.type"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "name": "n" * 257}], "messages.0.name"),
        (["x"], "messages.0"),
        ({}, "messages"),
        (None, "messages"),
    ],
)
def test_a_wrong_message_is_named(messages, param):
    with pytest.raises(InvalidRequest) as refused:
        CHAT.parse(json.dumps({"messages": messages}).encode())
    assert refused.value.param == param


def test_what_says_nothing_in_messages_of_the_past_passes():
    """OpenAI's own answers hold such fields, and clients send them back as they are."""
    said = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": {},
        "odd": "",
        "odder": [],
    }
    call = {"index": 0, "id": "1", "type": "function", "odd": None}
    call |= {"function": {"name": "f", "arguments": '{"a": 1}', "odd": []}}
    answer = {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "y", "odd": {}}]}
    messages = [{**said, "tool_calls": []}, {"role": "assistant", "tool_calls": [call]}, answer]
    body = CHAT.parse(json.dumps({"messages": messages}).encode())
    assert [message.as_template_input() for message in body.messages] == [
        {"role": "assistant", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "y", "name": "f", "tool_call_id": "1"},
    ]


GOOD_UNUSED = {
    "metadata": [{}, {"k" * 64: "v" * 512}, {str(number): "v" for number in range(16)}],
    "prompt_cache_key": ["a"],
    "safety_identifier": ["a"],
    "service_tier": ["auto", "default", "flex", "priority", "scale"],
    "store": [True, False],
}
WRONG_UNUSED = {
    "metadata": [{str(number): "v" for number in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}, {"k": 1}, []],
    "prompt_cache_key": ["a" * 1025, 1],
    "safety_identifier": ["a" * 1025, 1],
    "service_tier": ["best", 1],
    "store": ["yes", {}],
}


def test_what_changes_no_answer_is_checked_and_dropped():
    assert set(GOOD_UNUSED) == set(WRONG_UNUSED) == set(UNUSED)
    bare = COMPLETION.parse(b'{"prompt": "x"}').canonical()
    for name in UNUSED:
        for value in (None, *GOOD_UNUSED[name]):
            assert COMPLETION.parse(json.dumps({"prompt": "x", name: value}).encode()).canonical() == bare
        for value in WRONG_UNUSED[name]:
            with pytest.raises(InvalidRequest) as refused:
                COMPLETION.parse(json.dumps({"prompt": "x", name: value}).encode())
            assert refused.value.param.split(".")[0] == name


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_token": 5}, "max_token is not supported. Did you mean max_tokens?"),
        ({"temprature": 1}, "temprature is not supported. Did you mean temperature?"),
        ({"stream_options": {"include_usages": True}}, "include_usages is not supported. Did you mean include_usage?"),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages.0.contents is not supported. Did you mean content?",
        ),
        ({"qqq": 1}, "qqq is not supported. Leave it out."),
        ({"m" * 50: 1}, "m is not supported. Leave it out."),
        ({"tools": [{}]}, "Tool calling ('tools') is not supported yet; see docs/api.md#not-supported."),
        ({"response_format": {"type": "json_object"}}, "Structured output ('response_format') is not supported yet;"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "Images ('image_url') are not supported;",
        ),
    ],
)
def test_a_refusal_says_what_was_asked_for_or_what_may_have_been_meant(body, says):
    with pytest.raises(UnsupportedParameter, match=re.escape(says)):
        CHAT.parse(json.dumps({"messages": [{"role": "user", "content": "x"}]} | body).encode())


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"stop": ["a"] * 65}, "stop", "length <= 64"),
        ({"stop": 5}, "stop", "`str | array | null`, got `int`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "'image_url'",
        ),
    ],
)
def test_a_field_of_several_forms_is_refused_for_the_form_that_was_meant(change, param, says):
    body = {"messages": [{"role": "user", "content": "x"}]} | change
    with pytest.raises(InvalidRequest, match=re.escape(says)) as refused:
        CHAT.parse(json.dumps(body).encode())
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "canonical"),
    [
        (
            '{"prompt":"hello","max_tokens":5,"temperature":1,"seed":-1,"stop":["a"],"stream":true,'
            '"stream_options":{"include_usage":true},"user":null}',
            '{"stream":true,"stream_options":{"include_usage":true},"max_tokens":5,"temperature":1.0,"seed":-1,'
            '"stop":["a"],"prompt":"hello"}',
        ),
        (
            '{"presence_penalty":0.00001,"frequency_penalty":1e-7,"logit_bias":{"7":-100},"prompt":[1,2]}',
            '{"presence_penalty":0.00001,"frequency_penalty":1e-7,"logit_bias":{"7":-100.0},"prompt":[1,2]}',
        ),
    ],
)
def test_a_body_is_named_as_the_release_before_named_it(body, canonical):
    """A client that comes back with its Idempotency-Key may find a gateway of this release."""
    assert COMPLETION.parse(body.encode()).canonical() == canonical.encode()


@pytest.mark.parametrize("prompt", [[1, 2, 2**31 - 1], [[1, 2], [3]]])
def test_token_ids_are_kept_in_four_bytes_each(prompt):
    """They wait with their body, and a list of them is ten times as large as it."""
    body = COMPLETION.parse(json.dumps({"prompt": prompt}).encode())
    assert all(isinstance(ids, array) and ids.typecode == "i" for ids in body.prompts)
    assert [ids.tolist() for ids in body.prompts] == (prompt if isinstance(prompt[0], list) else [prompt])
    tokens = Parser(DetokenizeBody).parse(b'{"tokens": [1, 2]}').tokens
    assert tokens == array("i", [1, 2])
    assert Parser(DetokenizeBody).parse(b'{"tokens": []}').tokens == array("i")


def test_bodies_that_ask_for_the_same_are_named_the_same():
    first = {"prompt": "x", "n": 2, "logit_bias": {"5": 1, "7": 2}}
    second = {"logit_bias": {"7": 2.0, "5": 1.0}, "n": 2, "prompt": "x", "top_p": None, "odd": None, "tools": []}
    named = [COMPLETION.parse(json.dumps(body).encode()).canonical() for body in (first, second)]
    assert named[0] == named[1]
    others = [{**first, "n": 1}, {**first, "prompt": "y"}, {**first, "logit_bias": {"5": 1}}, {**first, "echo": False}]
    assert named[0] not in [COMPLETION.parse(json.dumps(body).encode()).canonical() for body in others]
