"""The tokenizer: any text survives it, transformers loads it, and the server renders its chat template the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.pocket.packages import TOPICS, prose
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pocket_moe.corpus.tokenizer import SPECIAL_TOKENS, sample, train_tokenizer, write_tokenizer
from services.gateway.chat_template import ChatTemplate, load_chat_template
from services.gateway.tokenizer import SpecialTokens

TEXTS = [f"{prose(topic, number)} In 1984, 1984 and 1984." for topic in TOPICS for number in range(3)]
TOKENIZER = train_tokenizer(TEXTS, 340)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(TOKENIZER, path)
    return path


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own() -> None:
    tokens = TOKENIZER.encode("in 1984, 42").tokens
    assert [token.strip("Ġ") for token in tokens if any(character.isdigit() for character in token)] == list("198442")
    assert not any(len(token.strip("Ġ")) > 1 and any(map(str.isdigit, token)) for token in TOKENIZER.get_vocab())


def test_special_tokens_come_first_and_the_size_is_exact() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert TOKENIZER.get_vocab_size() == 340


def test_a_sample_ends_at_its_limit() -> None:
    texts = [str(number) * 10 for number in range(100, 200)]
    taken = list(sample(texts, 300))
    assert len(taken) == 10
    assert taken == list(sample(reversed(texts), 300))
    assert not set(taken) <= set(texts[:50])


def test_transformers_loads_it(folder: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "The anchor — 12 naïve €s\n\n  of it"
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded(text).input_ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (0, 3, 340)


CHATS: list[tuple[str, str]] = [
    ("lighthouse", "define: lighthouse\n"),
    ("  bring oneself ", "define: bring oneself\n"),
    ("lighthouse?", "define: lighthouse\n"),
    ("jargon: kluge", "jargon: kluge\n"),
    ("define (devil): peace", "define (devil): peace\n"),
    ("It was a dark night.", "It was a dark night."),
    ("The keeper of the light went up", "The keeper of the light went up"),
    ("Genesis 1\n\n1 In the", "Genesis 1\n\n1 In the"),
    ("", ""),
]


@pytest.mark.parametrize(("message", "prompt"), CHATS)
def test_a_term_is_looked_up_and_other_text_goes_on(folder: Path, message: str, prompt: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Ignored."}, {"role": "user", "content": message}]
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt
    assert _served(folder).render(messages, add_generation_prompt=True, options={}) == prompt


def test_content_in_parts_is_joined(folder: Path) -> None:
    content = [{"type": "text", "text": part} for part in ("light", "house")]
    messages = [{"role": "user", "content": content}]
    assert _served(folder).render(messages, add_generation_prompt=True, options={}) == "define: lighthouse\n"


def _served(folder: Path) -> ChatTemplate:
    template = load_chat_template(folder, {}, SpecialTokens(eos_token=SPECIAL_TOKENS[0]))
    assert template is not None
    return template
