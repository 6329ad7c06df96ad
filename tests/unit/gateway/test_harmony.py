"""Answers that have channels: what is content, what is reasoning, and what of it a client sees when."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.http_peer import post
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gateway.harmony import Channels, marks_of
from services.gateway.parts import Parts
from services.gateway.tokenizer import SpecialTokens, TextCodec

CONTROLS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ m.thinking }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{{ reasoning_effort }}"
)
THINK, SAY = "<|channel|>analysis<|message|>{}<|end|>", "<|start|>assistant<|channel|>final<|message|>{}<|return|>"
ANSWER = THINK.format("Hm — 你好.") + SAY.format("Hello 🙂!")
TO_TOOL = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """A token for each byte, so that most characters of the texts take several, and the control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.add_tokens([" to", "to"])
    return TextCodec(tokenizer, SpecialTokens())


def read(codec: TextCodec, answer: str, prompt: str = "<|start|>assistant") -> dict[str, str]:
    """What each kind of part says."""
    marks = marks_of("gpt_oss", codec)
    assert marks is not None
    channels = Channels(marks, codec, codec.encode(prompt))
    found = {"content": "", "reasoning": ""}
    for kind, piece in [*map(channels.push, codec.encode(answer)), channels.flush()]:
        found[kind] += piece
    return found


CASES = {
    "thought and said": (ANSWER, "Hello 🙂!", "Hm — 你好."),
    "said alone": (SAY.format("Yes.").removeprefix("<|start|>assistant"), "Yes.", ""),
    "cut in a thought": ("<|channel|>analysis<|message|>Let", "", "Let"),
    "cut in a header": (THINK.format("So.") + "<|start|>assistant<|chan", "", "So."),
    "cut in a character": ("<|channel|>final<|message|>é"[:-1] + "Ã", "Ã", ""),
    "two thoughts": (THINK.format("a") + "<|start|>assistant" + THINK.format("b") + SAY.format("c"), "c", "a\nb"),
    "a preamble": (
        "<|channel|>commentary<|message|>I will look.<|end|>" + SAY.format("Found."),
        "I will look.\nFound.",
        "",
    ),
    "to a tool": (THINK.format("a") + TO_TOOL.format('{"x": 1}'), "", 'a\n{"x": 1}'),
    "to a tool by the channel": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
        "{}",
    ),
    "to a tool at once": (" to=f<|channel|>commentary<|message|>{}<|call|>", "", "{}"),
    "no header": ("Hello to you", "Hello to you", ""),
    "no channel": ("<|message|>Hello", "Hello", ""),
    "without a new start": ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b", "a"),
    "nothing": ("", "", ""),
}


@pytest.mark.parametrize(("answer", "content", "reasoning"), CASES.values(), ids=CASES)
def test_each_text_is_of_its_channel(codec: TextCodec, answer: str, content: str, reasoning: str) -> None:
    assert read(codec, answer) == {"content": content, "reasoning": reasoning}


@pytest.mark.parametrize(
    ("prompt", "content", "reasoning"),
    [
        ("<|start|>assistant<|channel|>final<|message|>I", " think.", ""),
        ("<|start|>assistant<|channel|>analysis<|message|>", "", " think."),
        ("<|start|>user<|message|>a<|end|>", " think.", ""),
        ("no marks", " think.", ""),
        ("", " think.", ""),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(codec: TextCodec, prompt: str, content: str, reasoning: str) -> None:
    assert read(codec, " think.", prompt) == {"content": content, "reasoning": reasoning}


TEXTS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<|"), min_size=1, max_size=9)


@given(said=st.lists(st.tuples(st.sampled_from(["analysis", "final", "commentary"]), TEXTS), max_size=5))
def test_any_messages(codec: TextCodec, said: list[tuple[str, str]]) -> None:
    answer = "".join(f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>" for channel, text in said)
    expected = {
        "content": "\n".join(text for channel, text in said if channel != "analysis"),
        "reasoning": "\n".join(text for channel, text in said if channel == "analysis"),
    }
    assert read(codec, answer.removeprefix("<|start|>assistant")) == expected


def test_marks_are_those_of_a_family_and_its_tokenizer(codec: TextCodec) -> None:
    assert marks_of("qwen3_moe", codec) is None
    assert marks_of("gpt_oss", TextCodec(Tokenizer(models.BPE()), SpecialTokens())) is None


@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.integers(1, 3)), max_size=6))
def test_parts_of_a_text_are_found(runs: list[tuple[str, int]]) -> None:
    parts, kinds = Parts(), []
    for kind, length in runs:
        parts.note(len(kinds), kind)  # type: ignore[arg-type]
        kinds += [kind] * length
    for kind in ("content", "reasoning"):
        places = [place for begin, end in parts.of(kind, len(kinds)) for place in range(begin, end)]  # type: ignore[arg-type]
        assert places == [place for place, found in enumerate(kinds) if found == kind]
    at = 0
    while at < len(kinds):
        kind, end = parts.at(at, len(kinds))
        assert end > at
        assert set(kinds[at:end]) == {kind}
        at = end


ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
CHAT = "/v1/chat/completions"


async def test_a_whole_answer_has_content_and_reasoning(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    gateway.says(ANSWER, finish="stop")
    answer = (await gateway.http.post(CHAT, json=ASK)).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message == {
        "role": "assistant",
        "content": "Hello 🙂!",
        "refusal": None,
        "reasoning_content": "Hm — 你好.",
        "reasoning": "Hm — 你好.",
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert usage["completion_tokens"] == len(codec.encode(ANSWER))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm — 你好.".encode())}
    typed = await gateway.openai.chat.completions.create(model="tiny", messages=ASK["messages"])
    assert typed.choices[0].message.reasoning_content == "Hm — 你好."
    assert typed.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "return_token_ids": True}], ids=["text", "records"])
async def test_a_stream_has_both_in_their_order(start, codec, more):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    token_ids = gateway.says(ANSWER, finish="stop")
    answer = await gateway.http.post(CHAT, json=ASK | more | {"stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    said = ["content" if "reasoning" not in delta else "reasoning" for delta in deltas[1:] if delta]
    assert said == sorted(said, reverse=True), "reasoning first"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert all(len({"content", "reasoning"} & delta.keys()) <= 1 for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello 🙂!"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm — 你好."
    assert choices[-1]["finish_reason"] == "stop"
    if more:
        assert [token for choice in choices for token in choice.get("token_ids", [])] == token_ids


async def test_each_token_of_a_live_stream_is_sent_when_it_comes(start, codec, script):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    peer = await gateway.connect(post(ASK | {"stream": True}, path=CHAT))
    (request,) = await gateway.queue.wait_for("admitted")
    pieces = ["<|channel|>analysis<|message|>", "a", "b", "<|end|><|start|>assistant<|channel|>final<|message|>", "c"]
    coming = iter(script.events(request, codec.encode("".join(pieces)), finish=None))
    said: list[tuple[str, str]] = []
    for piece in pieces:
        for _ in codec.encode(piece):
            gateway.queue.emit(next(coming))
        while len(piece) == 1 and piece not in dict(said[-1:]).values():
            chunk = json.loads((await peer.until(b"}\n\n")).partition(b"data: ")[2])
            said += [(name, text) for name, text in chunk["choices"][0]["delta"].items() if text == piece]
    thought = [("reasoning_content", "a"), ("reasoning", "a"), ("reasoning_content", "b"), ("reasoning", "b")]
    assert said == [*thought, ("content", "c")]


async def test_a_stop_string_counts_in_the_content_alone(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    gateway.says(THINK.format("a STOP b") + SAY.format("c STOP d"))
    answer = (await gateway.http.post(CHAT, json=ASK | {"stop": " STOP"})).json()["choices"][0]
    assert (answer["message"]["content"], answer["message"]["reasoning"]) == ("c", "a STOP b")
    assert answer["finish_reason"] == "stop"


async def test_text_held_back_for_a_stop_string_stays_where_it_was_said(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    preamble = "<|channel|>commentary<|message|>a ST<|end|>"
    gateway.says(preamble + "<|start|>assistant" + THINK.format("OP") + SAY.format("b"))
    answer = await gateway.http.post(CHAT, json=ASK | {"stop": "STOP", "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    said = [text for chunk in chunks for text in list(chunk["choices"][0]["delta"].values())[-1:] if text]
    assert "".join(said) == "a STOP\nb"
    assert "OP" in said, "a part of its own"


async def test_other_models_and_completions_have_no_channels(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="qwen3_moe", max_len=1024)
    gateway.says(ANSWER)
    answer = (await gateway.http.post(CHAT, json=ASK)).json()
    shown = re.sub(r"<\|\w+\|>", "", ANSWER)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": shown, "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    gateway.says(ANSWER)
    answer = (await gateway.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 200})).json()
    assert answer["choices"][0]["text"] == shown


async def test_reasoning_of_the_past_reaches_the_template(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    gateway.says(ANSWER)
    for name in ("reasoning_content", "reasoning"):
        past = [*ASK["messages"], {"role": "assistant", "content": "yes", name: "<|end|>so"}, *ASK["messages"]]
        await gateway.http.post(CHAT, json=ASK | {"messages": past})
        prompt = codec.decode(gateway.queue.admitted[-1].token_ids)
        assert "<|start|>assistant<|message|>yes<|end|>so<|end|>" in prompt
        ends = gateway.queue.admitted[-1].token_ids.count(codec.tokenizer.token_to_id("<|end|>"))
        assert ends == 3, "what was thought makes no control token"
    refused = await gateway.http.post(
        CHAT, json=ASK | {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}
    )
    assert refused.status_code == 400


async def test_the_effort_goes_to_templates_that_have_it(start, codec):
    gateway = await start(codec=codec, template=TEMPLATE, family="gpt_oss", max_len=1024)
    gateway.says(ANSWER)
    await gateway.http.post(CHAT, json=ASK | {"reasoning_effort": "high"})
    assert codec.decode(gateway.queue.admitted[-1].token_ids).endswith("<|start|>assistanthigh")
    wrong = await gateway.http.post(CHAT, json=ASK | {"reasoning_effort": "most"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_effort")
    other = await start(codec=codec, template=TEMPLATE.partition("{{ reasoning_effort")[0], max_len=1024)
    refused = (await other.http.post(CHAT, json=ASK | {"reasoning_effort": "low"})).json()["error"]
    assert (refused["param"], refused["code"]) == ("reasoning_effort", "unsupported_parameter")
