"""The rules themselves: what a rule is made of, and that none names what is not there."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from services.queue.acl import RULES, Rule, hashed, permissions, user_line
from services.queue.keys import Keys
from services.queue.scripts import load_scripts

KEYS = Keys("n")


def test_a_rule_names_patterns_and_commands() -> None:
    words = permissions("experts", KEYS).split()
    assert words[0] == "resetchannels"
    assert {"~{n}:", "~{n}:seat:*", "%R~{n}:table", "-@all", "+evalsha", "+hset"} <= set(words)
    assert not {"+eval", "+script|load", "+hgetall", "~*", "~{n}:*", "+@all"} & set(words)
    assert words.index("-@all") < min(words.index(word) for word in words if word.startswith("+"))


def test_before_7_0_what_is_read_can_be_written() -> None:
    words = permissions("gateway", KEYS, (6, 2)).split()
    assert "~{n}:keys" in words
    assert not [word for word in words if word.startswith("%")]


def test_of_two_rules_a_key_that_one_writes_is_not_for_reading_alone() -> None:
    both = Rule(reads=frozenset({"a", "b"})) | Rule(owns=frozenset({"a"}))
    assert (both.owns, both.reads) == ({"a"}, {"b"})


def test_commands_of_containers_are_permitted_by_their_second_word() -> None:
    for role in set(RULES) - {"renewal"}:
        assert not {"script", "memory", "config", "client", "object", "xinfo"} & RULES[role].allowed(), role


def test_every_script_is_somebodys_and_every_name_a_scripts() -> None:
    run = {name for role, rule in RULES.items() if role != "operator" for name in rule.scripts}
    assert run == set(load_scripts())


def test_every_key_of_the_rules_is_one_of_the_queues() -> None:
    """In full: one that no script and no name knows would be a permission that nobody needs."""
    folder = resources.files("services.queue")
    texts = [file.read_text() for file in (folder / "lua").iterdir()] + [(folder / "keys.py").read_text()]
    known = set(re.findall(r"P \.\. '([a-z_:]+)|self\.prefix\}([a-z_:]+)", "\n".join(texts)))
    names = {name for pair in known for name in pair if name}
    starts = {name for name in names if name.endswith(":")}
    starts |= {kind for text in texts for kind in re.findall(r"'(worker:|held:|inbox:)'", text)}
    for role, rule in RULES.items():
        assert (rule.owns | rule.reads) - {"*"} <= names | starts, role


@pytest.mark.parametrize("password", [None, "secret"])
def test_a_line_has_the_hash_of_the_password(password: str | None) -> None:
    line = user_line("me", "-@all", password)
    assert line == (f"user me on #{hashed('secret')} -@all" if password else "user me on -@all")
    assert "secret" not in line
