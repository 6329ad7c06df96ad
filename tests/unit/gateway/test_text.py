"""Tokens to text: whole characters only, stop strings never, the same text whatever the cuts."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from services.errors import CheckpointError, InvalidRequest
from services.gateway import tokenizer as tokenizer_module
from services.gateway.chat_prompt import ChatEncoder
from services.gateway.chat_template import ChatTemplate, load_chat_template
from services.gateway.conversation import Conversation
from services.gateway.detokenize import StopSet, detokenizer
from services.gateway.tokenizer import SpecialTokens, TextCodec, load_codec, read_tokenizer_config


@pytest.fixture(scope="module")
def byte_fallback() -> TextCodec:
    """A sentencepiece-style vocabulary: leading spaces as U+2581, unknown characters as byte tokens."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁fox", "x", "▁", "é", "▁a"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return TextCodec(tokenizer, SpecialTokens())


def pieces(codec: TextCodec, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    text = detokenizer(codec, prompt or [])
    return [*(text.push(token_id) for token_id in token_ids), text.flush()]


@settings(max_examples=200)
@given(token_ids=st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_give_the_text_of_the_whole_decode(codec, token_ids):
    token_ids = [token_id for token_id in token_ids if codec.tokenizer.id_to_token(token_id) is not None]
    assert "".join(pieces(codec, token_ids)) == codec.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=100)
@given(text=st.text(max_size=30))
def test_valid_text_never_shows_half_a_character(codec, text):
    found = pieces(codec, codec.encode(text))
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found) or "\ufffd" in text


@settings(max_examples=100)
@given(token_ids=st.lists(st.integers(259, 264), max_size=30))
def test_window_decoding_continues_the_prompt(byte_fallback, token_ids):
    prompt = [259, 261]
    whole = byte_fallback.decode(prompt + token_ids)
    assert byte_fallback.decode(prompt) + "".join(pieces(byte_fallback, token_ids, prompt)) == whole


@settings(max_examples=100)
@given(text=st.text(alphabet="é你🙂 x", max_size=12))
def test_window_decoding_of_byte_tokens(byte_fallback, text):
    token_ids = [3 + byte for byte in text.encode()]
    found = pieces(byte_fallback, token_ids, [259])
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)


def test_window_decoding_gives_up_on_bytes_that_never_become_a_character(byte_fallback):
    found = pieces(byte_fallback, [3 + 0xFF] * 40, [259])
    assert "".join(found) == "\ufffd" * 40
    assert max(map(len, found)) <= 20


def test_token_names(codec, byte_fallback):
    first, second = codec.encode("é")
    assert codec.token_bytes(first) + codec.token_bytes(second) == "é".encode()
    assert codec.token_text(first) == "bytes:\\xc3"
    assert codec.token_text(1) == "<|eos|>"
    assert codec.token_bytes(10**6) == b""
    assert codec.token_text(10**6) == "token_id:1000000"
    assert byte_fallback.token_text(259) == " the"
    assert byte_fallback.token_bytes(3 + 0xE4) == b"\xe4"
    assert byte_fallback.token_text(0) == "<s>"


def plain_search(stops, pieces):
    """What each push returns, by trying every place; then what flush returns."""
    held = ""
    for piece in pieces:
        text = held + piece
        ends = range(len(held) + 1, len(text) + 1)
        begins = [end - len(stop) for end in ends for stop in stops if text[:end].endswith(stop)]
        if begins:
            yield text[: min(begins)], True
            return
        keep = max(
            size for size in range(len(text) + 1) if any(stop.startswith(text[len(text) - size :]) for stop in stops)
        )
        held = text[len(text) - keep :]
        yield text[: len(text) - keep], False
    yield held


@settings(max_examples=1000)
@given(
    stops=st.lists(st.text(alphabet="ab\U0001f600", min_size=1, max_size=7), min_size=1, max_size=8),
    pieces=st.lists(st.text(alphabet="ab\U0001f600", max_size=9), max_size=12),
)
def test_what_goes_out_with_each_token_is_what_a_plain_search_says(stops, pieces):
    found = StopSet(stops).finder()
    expected = list(plain_search(stops, pieces))
    got = [found.push(piece) for piece in pieces[: len(expected)]]
    assert [*got, found.flush()][: len(expected)] == expected


def test_a_character_costs_no_more_with_many_stop_strings():
    lines = 0

    def count(_frame, event, _argument):
        nonlocal lines
        lines += event == "line"
        return count

    found = StopSet([" " * size + "x" for size in range(1, 65)]).finder()
    found.push(" " * 100)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        found.push(" " * 128)
    finally:
        sys.settrace(before)
    assert lines < 20 * 128


def test_checkpoint_files(model_dir):
    config = read_tokenizer_config(model_dir)
    codec = load_codec(model_dir, config)
    assert (codec.special.bos_token, codec.special.eos_token, codec.special.pad_token) == ("<|bos|>", "<|eos|>", None)
    template = load_chat_template(model_dir, config, codec.special)
    assert template is not None
    (model_dir / "chat_template.jinja").write_text("{{ eos_token }}")
    template = load_chat_template(model_dir, config, codec.special)
    assert template is not None
    assert template.render([], add_generation_prompt=True, options={}) == "<|eos|>"
    named = {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}
    (model_dir / "chat_template.jinja").unlink()
    template = load_chat_template(model_dir, named, codec.special)
    assert template is not None
    assert template.source == "d"
    assert load_chat_template(model_dir, {}, codec.special) is None


def test_encoding_a_long_text_lets_other_threads_run(codec):
    with ThreadPoolExecutor(1) as pool:
        encoding, beats = pool.submit(codec.encode, "the fox " * 200_000), 0
        while not encoding.done():
            time.sleep(0.001)
            beats += 1
    assert beats > 10, "the event loop would have stood still"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_damaged_tokenizer_files_are_startup_errors(model_dir, content):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        good = (model_dir / name).read_bytes()
        (model_dir / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            load_codec(model_dir, read_tokenizer_config(model_dir))
        (model_dir / name).write_bytes(good)
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_codec(model_dir, {})


FAILS_ON_ALL = {"type": "FixedLength", "length": 0}
"""A pre-tokenizer on which the library panics, whatever the text; expressions do so where they go back too often."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read"),
        ({"pre_tokenizer": FAILS_ON_ALL}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}}, "4,294,967,295"),
        ({"post_processor": {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 1]}}, "4,294,967,295"),
        ({"_MAX_ADDED": 1}, "2 added tokens; the maximum is 1"),
        ({"_MAX_FILE_BYTES": 1000}, "more than 1,000 bytes"),
    ],
    ids=["panic", "panic on any text", "id", "id of a template", "added tokens", "size"],
)
def test_tokenizers_that_cannot_work_are_startup_errors(model_dir, changes, says, monkeypatch):
    path = model_dir / "tokenizer.json"
    described = msgspec.json.decode(path.read_bytes())
    for name, value in changes.items():
        if name.startswith("_"):
            monkeypatch.setattr(tokenizer_module, name, value)
        else:
            described[name] = value
    path.write_bytes(msgspec.json.encode(described))
    with pytest.raises(CheckpointError, match=says) as refused:
        load_codec(model_dir, {})
    assert str(path) in str(refused.value)


def test_a_text_that_the_tokenizer_fails_on_is_the_clients(codec):
    described = msgspec.json.decode(codec.tokenizer.to_str())
    failing = Tokenizer.from_str(msgspec.json.encode(described | {"pre_tokenizer": FAILS_ON_ALL}).decode())
    failing_codec = TextCodec(failing, codec.special)
    template = ChatTemplate("{{ messages[0].content }}", codec.special)
    chat_encoder = ChatEncoder(template, failing_codec, lambda _text: None)
    with pytest.raises(InvalidRequest, match="tokenizer fails on this text"):
        failing_codec.encode("x")
    for text in ("x", "x<|eos|>"):
        chat = Conversation(messages=[{"role": "user", "content": text}], add_generation_prompt=True, options={})
        with pytest.raises(InvalidRequest, match="tokenizer fails on this text"):
            chat_encoder.token_ids(chat)


def test_a_template_that_is_not_text_or_does_not_parse_is_a_startup_error(model_dir, codec):
    for content, says in ((b"\xff{{ messages }}", r"chat_template\.jinja"), (b"{% if %}", "line 1")):
        (model_dir / "chat_template.jinja").write_bytes(content)
        with pytest.raises(CheckpointError, match=says):
            load_chat_template(model_dir, {}, codec.special)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[9].content }}{{ undefined.field }}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ messages | sum }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% set nothing %}{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}{% endset %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) ~ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{% for a in range(999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_templates_cannot_reach_python_and_failures_are_the_clients(source):
    template = ChatTemplate(source, SpecialTokens())
    with pytest.raises(InvalidRequest) as refused:
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, options={})
    assert refused.value.param == "messages"


def test_template_tools_that_checkpoints_use():
    source = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}{{ thinking }}"
        "{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, SpecialTokens())
    messages = [{"role": "user", "content": "<é>"}] * 2
    rendered = template.render(messages, add_generation_prompt=False, options={"thinking": True})
    assert rendered == '{"role": "user", "content": "<é>"}True4'


def test_template_equals_that_of_transformers(codec):
    from transformers import PreTrainedTokenizerFast

    source = (
        "{%- for message in messages %}\n    {{- '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|assistant|>\n' }}\n{%- endif %}"
        "{% for name, value in messages[0].items() if value %}{{ loop.length ~ loop.revindex ~ loop.last ~ name }}"
        "{{ loop.nextitem ~ loop.changed(value) }}{% endfor %}{% for x in absent %}{% else %}none{% endfor %}"
        "{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": " hi\n"}, {"role": "assistant", "content": "yes"}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=codec.tokenizer, eos_token="<|eos|>", chat_template=source)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(source, SpecialTokens(eos_token="<|eos|>"))
    assert ours.render(messages, add_generation_prompt=True, options={}) == expected
