"""Workloads: what is asked, and that it does not depend on who asks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import StreamResult
from loadgen.errors import BadSetting, FileUnusable
from loadgen.fairness import jain
from loadgen.workload.bodies import Bodies
from loadgen.workload.conversation import Tenant
from loadgen.workload.files import read_prompts
from loadgen.workload.hot_experts import Recording, hot_experts, parse_experts, read_recording, shares
from loadgen.workload.synthetic import TOOLS, Agents, Chat, Singles
from loadgen.workload.tenants import WithTenants, read_tenants
from loadgen.workload.words import Lengths, Prompts, parse_lengths

POCKET = Path(__file__).resolve().parents[3] / "loadgen/day/pocket-routing.json"
IDS, WORDS = Prompts(ids=True), Prompts(ids=False)
SINGLES = Singles(prompts=IDS, prompt_tokens=Lengths(8, 128), output_tokens=Lengths(1, 128), seed=5)
COMPLETIONS, CHATS = Bodies(endpoint="completions", model="m"), Bodies(endpoint="chat", model="m")


def said(text: str, **more: object) -> StreamResult:
    return StreamResult(started=0.0, text=text, **more)  # type: ignore[arg-type]


def test_expert_flows_lengths_are_uniform() -> None:
    turns = [SINGLES.conversation(number).turns[0] for number in range(6000)]
    for counts, least in (
        (Counter(len(turn.content) for turn in turns), 8),
        (Counter(turn.output_tokens for turn in turns), 1),
    ):
        wanted = 6000 / (129 - least)
        assert set(counts) == set(range(least, 129))
        squares = sum((count - wanted) ** 2 / wanted for count in counts.values())
        assert squares < 129 - least + 5 * (2 * (129 - least)) ** 0.5  # chi-square, five deviations
    assert all(10 <= token < 1000 for turn in turns[:100] for token in turn.content)
    assert len({tuple(turn.content) for turn in turns}) == 6000


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_a_conversation_is_the_same_for_every_process(number: int, seed: int) -> None:
    lengths = Lengths(1, 9)
    chat = Chat(
        prompts=WORDS,
        prefixes=3,
        system_tokens=20,
        turns=Lengths(1, 4),
        prompt_tokens=lengths,
        output_tokens=lengths,
        think_s=1.0,
        seed=seed,
    )
    assert chat.conversation(number) == chat.conversation(number)
    assert chat.conversation(number) != chat.conversation(number + 1)


def test_chats_share_their_system_prompts_and_grow_by_their_answers() -> None:
    chat = Chat(
        prompts=WORDS,
        prefixes=2,
        system_tokens=50,
        turns=Lengths(2, 2),
        prompt_tokens=Lengths(5, 5),
        output_tokens=Lengths(7, 7),
        think_s=0.0,
        seed=0,
    )
    every = [chat.conversation(number) for number in range(50)]
    assert len({each.system for each in every}) == 2
    body = CHATS.body(every[0], 1, [said("An answer.")])
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "An answer."
    assert body["max_tokens"] == 7
    text = COMPLETIONS.body(every[0], 1, [said("An answer.")])["prompt"]
    assert text.startswith(f"system: {every[0].system}\nuser: ")
    assert text.endswith("assistant:")
    assert "assistant: An answer.\n" in text


def agents(*, tools: bool) -> Agents:
    lengths = Lengths(10, 10)
    return Agents(prompts=WORDS, steps=Lengths(3, 3), result_tokens=lengths, output_tokens=lengths, tools=tools, seed=0)


def test_results_of_tools_answer_the_calls_that_came_in_pieces() -> None:
    pieces = [
        {"index": 0, "id": "call-1", "function": {"name": "read_file", "arguments": '{"pa'}},
        {"index": 0, "function": {"arguments": 'th": "a"}'}},
    ]
    body = CHATS.body(agents(tools=True).conversation(0), 1, [said("", tool_calls=pieces)])
    assert body["tools"] == list(TOOLS)
    call, result = body["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path": "a"}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")


def test_without_tools_their_results_are_text() -> None:
    body = CHATS.body(agents(tools=False).conversation(0), 1, [said("Use a tool.")])
    assert "tools" not in body
    assert body["messages"][-1]["role"] == "user"
    assert body["messages"][-1]["content"].startswith("Result of ")


def test_tenants_have_their_share_their_key_and_their_priority(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    path = tmp_path / "tenants.json"
    path.write_text('[{"name": "a", "share": 3, "key_file": "key"}, {"name": "b", "priority": 7, "weight": 2}]')
    tenants = read_tenants(path)
    assert tenants[0] == Tenant(name="a", share=3.0, key="secret")
    source = WithTenants(source=SINGLES, tenants=tenants, seed=1)
    every = [source.conversation(number) for number in range(2000)]
    counts = Counter(each.tenant.name for each in every if each.tenant)
    assert counts["a"] == pytest.approx(1500, abs=100)
    of_b = next(each for each in every if each.tenant == tenants[1])
    assert COMPLETIONS.body(of_b, 0, [])["priority"] == 7
    path.write_text('[{"name": "a"}, {"name": "a"}]')
    with pytest.raises(BadSetting, match="need names"):
        read_tenants(path)
    path.write_text('[{"nmae": "a"}]')
    with pytest.raises(FileUnusable, match="nmae"):
        read_tenants(path)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8))
def test_jains_index_is_one_where_all_are_equal_and_never_below_one_over_n(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([values[0]] * len(values)) == pytest.approx(1.0)
    assert jain([values[0], *[0.0] * len(values)]) == pytest.approx(1 / (len(values) + 1))


def test_files_of_users_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    turns = [("human", "Hello"), ("gpt", "one two three"), ("human", "More"), ("gpt", "word " * 300)]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in turns]}, {}]))
    [chat] = read_prompts(path, most_tokens=64).conversations
    assert [(turn.content, turn.output_tokens) for turn in chat.turns] == [("Hello", 4), ("More", 64)]
    lines = [
        {"prompt": "a b", "max_tokens": 3, "topic": "verse"},
        {"prompt": [1, 2], "output_ids": [7, 8]},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_prompts(path, most_tokens=64)
    assert [each.turns[0].output_tokens for each in found.conversations] == [3, 2, 64]
    assert found.conversation(3) == found.conversation(0)
    assert found.conversations[0].turns[0].name == "verse"
    assert [message["role"] for message in CHATS.body(found.conversations[2], 0, [])["messages"]] == ["system", "user"]
    path.write_text("text")
    with pytest.raises(FileUnusable, match="no known form"):
        read_prompts(path, most_tokens=64)


def test_prompts_are_those_whose_rows_go_to_the_experts() -> None:
    counts = {
        "cold": [[5.0, 5.0], [9.0, 1.0]],
        "warm": [[5.0, 5.0], [5.0, 5.0]],
        "hot": [[1.0, 9.0], [0.0, 10.0]],
    }
    recording = Recording(counts, {name: [f"prompt of {name}"] for name in counts})
    found = hot_experts(recording, [(1, 1)], keep=2, output_tokens=3, more_prompts={})
    assert [found.conversation(number).turns[0].content for number in range(3)] == [
        "prompt of hot",
        "prompt of warm",
        "prompt of hot",
    ]
    assert "75.0%" in found.text
    with pytest.raises(BadSetting, match="no expert 2:0"):
        shares(recording, [(2, 0)])
    with pytest.raises(BadSetting, match="LAYER:EXPERT"):
        parse_experts("1-2")


def test_the_pocket_models_topics_make_its_experts_hot() -> None:
    recording = read_recording(POCKET)
    found = shares(recording, [(4, 7)])
    hottest = max(found, key=lambda name: found[name])
    assert hottest == "documentation"
    assert found[hottest] > 2 / 16 > found["prose"]
    more = {name: [f"text of {name}"] for name in recording.counts}
    chosen = hot_experts(recording, [(4, 7)], keep=1, output_tokens=8, more_prompts=more)
    assert chosen.conversation(0).turns[0].content == "text of documentation"
    with pytest.raises(BadSetting, match="--prompts FILE"):
        hot_experts(recording, [(4, 7)], keep=1, output_tokens=8, more_prompts={})


def test_lengths_are_parsed() -> None:
    assert (parse_lengths("64"), parse_lengths("8..128")) == (Lengths(64, 64), Lengths(8, 128))
    for text in ("0", "9..8", "a", "1..b"):
        with pytest.raises(BadSetting):
            parse_lengths(text)
