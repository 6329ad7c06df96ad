"""Texts that cannot fit are refused for little, and none that fits is refused."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.pocket.answers import POCKET
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.errors import ContextLengthExceeded
from services.gateway import prompts as fits_module
from services.gateway.prompts import Fits
from services.gateway.tokenizer import SpecialTokens, TextCodec, load_codec, read_tokenizer_config

SIZE = 600
"""Characters of a piece here, so that texts of some thousand have many cuts."""


def _pieces() -> Tokenizer:
    """Sentence pieces: words are not separated before merging, and spaces are characters like others."""
    merges = [("a", "b"), ("ab", "ab"), ("▁", "ab"), ("b", "a"), ("▁", "▁"), ("▁▁", "▁▁"), ("abab", "abab")]
    vocabulary = {char: index for index, char in enumerate("ab▁c\n1")}
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def _whole_words() -> Tokenizer:
    """A word that is not known is one token, however long."""
    known = {"[UNK]": 0} | {char: index for index, char in enumerate("abc1", 1)} | {"##a": 10, "##b": 11, "##1": 12}
    tokenizer = Tokenizer(models.WordPiece(known, unk_token="[UNK]", max_input_chars_per_word=50))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _unigram() -> Tokenizer:
    scores = [("<unk>", 0.0), *((char, -5.0) for char in "ab▁c\n1"), ("ab", -3.0), ("▁ab", -2.5), ("abab", -4.0)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


CODECS = {
    "bytes": load_codec(POCKET / "model", read_tokenizer_config(POCKET / "model")),
    "pieces": TextCodec(_pieces(), SpecialTokens()),
    "words": TextCodec(_whole_words(), SpecialTokens()),
    "unigram": TextCodec(_unigram(), SpecialTokens()),
}
TEXTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "ab", "abab", " ", "  ", "\n", "1", "c", "ab ", "!"]), st.integers(1, 400)),
    min_size=1,
    max_size=30,
).map(lambda runs: "".join(text * count for text, count in runs))


def _fits(codec: TextCodec, most: int, monkeypatch: pytest.MonkeyPatch, surely: float = 0.0) -> Fits:
    """``surely``: see there; 0 counts every text that is not short."""
    for name, value in {"PIECE_CHARS": SIZE, "SAMPLES": 4, "SAMPLE_CHARS": 64, "SURELY": surely}.items():
        monkeypatch.setattr(fits_module, f"_{name}", value)
    return Fits(codec, lambda: most)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, threading.Thread]]:
    """Texts that any codec encodes, and in which threads."""
    found, encode = list[tuple[str, threading.Thread]](), TextCodec.encode

    def noted(codec: TextCodec, text: str, **options: bool) -> list[int]:
        found.append((text, threading.current_thread()))
        return encode(codec, text, **options)

    monkeypatch.setattr(TextCodec, "encode", noted)
    return found


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_no_text_is_refused_that_fits(name, text):
    codec = CODECS[name]
    with pytest.MonkeyPatch.context() as patch:
        count = len(codec.encode(text, add_special_tokens=False))
        _fits(codec, count, patch).check(text, "prompt")


@pytest.mark.parametrize("name", ["bytes", "pieces", "unigram"])  # the last piece may be a word that is known
@pytest.mark.parametrize("unit", ["ab ", "abab", "ab ab1 ", "1"])
def test_the_slack_is_far_more_than_a_cut_changes(name, unit, monkeypatch):
    """256 tokens are kept for each cut; of texts of one kind a cut changes a few."""
    codec = CODECS[name]
    text = unit * (20 * SIZE // len(unit))
    count = len(codec.encode(text, add_special_tokens=False))
    monkeypatch.setattr(fits_module, "_SLACK", 8)
    _fits(codec, count, monkeypatch).check(text, "prompt")


@pytest.mark.parametrize("unit", ["ab ", "the quick brown fox ", "1234567890", "你好", " \n\t"])
def test_a_text_that_cannot_fit_is_refused_before_much_of_it_is_tokenized(unit, monkeypatch, encoded):
    text = unit * (200 * SIZE // len(unit))
    with pytest.raises(ContextLengthExceeded, match="at least") as refused:
        _fits(CODECS["bytes"], 100, monkeypatch).check(text, "messages")
    assert refused.value.param == "messages"
    read = [len(piece) for piece, _ in encoded]
    assert max(read, default=0) <= SIZE
    assert sum(read) < len(text) / 5


def test_a_text_that_is_dense_at_its_end_alone_is_refused_there(monkeypatch):
    """What comes first says nothing of the rest, so the rest is counted, piece by piece."""
    codec = CODECS["bytes"]
    sparse, dense = "the " * 300, "1x2y" * 2_000
    most = len(codec.encode(sparse, add_special_tokens=False)) + 300
    with pytest.raises(ContextLengthExceeded):
        _fits(codec, most, monkeypatch).check(sparse + dense, "prompt")


@pytest.mark.parametrize("ahead", [True, False])
def test_a_text_that_fits_by_its_samples_is_not_counted_twice(ahead, monkeypatch, encoded):
    """Wherever it is dense: samples are taken at random."""
    codec = CODECS["bytes"]
    sparse, dense = "the " * 2_000, "1x2y" * 2_000
    text = sparse + dense if ahead else dense + sparse
    count = len(codec.encode(text, add_special_tokens=False))
    encoded.clear()
    _fits(codec, 3 * count, monkeypatch, surely=0.9).check(text, "prompt")
    assert sum(len(piece) for piece, _ in encoded) < 4 * 65
    _fits(codec, count, monkeypatch, surely=0.1).check(text, "prompt")
    assert sum(len(piece) for piece, _ in encoded) > len(text), "what may not fit is counted"


@pytest.mark.parametrize("most", [50, 1_000])
def test_a_text_is_not_tokenized_that_would_take_long_even_if_it_fits(most, monkeypatch):
    monkeypatch.setattr(fits_module, "_MAX_CHARS", 1_000)
    codec = CODECS["words"]  # of which any long word is one token
    limit = max(1_000, 8 * most)
    fits = _fits(codec, most, monkeypatch)
    fits.check("a" * limit, "prompt")
    monkeypatch.setattr(codec, "encode", None)
    with pytest.raises(
        ContextLengthExceeded, match=f"{limit + 1} characters; the maximum for this context is {limit}"
    ) as refused:
        fits.check("a" * (limit + 1), "messages")
    assert refused.value.param == "messages"


def test_a_text_is_cut_before_a_space_where_there_is_one(monkeypatch):
    monkeypatch.setattr(fits_module, "_PIECE_CHARS", 1_999)
    text = "word " * 1_000
    pieces = list(fits_module._pieces(text))
    assert "".join(pieces) == text
    assert all(piece.startswith(" ") for piece in pieces[1:])
    assert [len(piece) for piece in fits_module._pieces("x" * 5_000)] == [1_999, 1_999, 1_002]
    assert "".join(fits_module._pieces(" " * 5_000)) == " " * 5_000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_megabytes_are_refused_by_the_number_of_their_tokens(start, path):
    gateway = await start(max_body_bytes=4 << 20)
    text = "ab1 " * 1_000_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = await gateway.http.post(path, json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_exceeds_the_context_a_little_is_counted_all_the_same(gateway):
    answer = await gateway.http.post("/tokenize", json={"prompt": "ab1 " * 1_000})
    assert answer.json()["count"] > gateway.intake.prompts.max_model_len


async def test_more_tokens_than_the_context_holds_are_not_put_into_words(gateway):
    answer = await gateway.http.post("/detokenize", json={"tokens": [5] * 257})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await gateway.http.post("/detokenize", json={"tokens": [5] * 256})).status_code == 200


async def test_texts_of_one_body_count_together_as_soon_as_it_is_known(start, encoded):
    gateway = await start(max_queued_tokens=1_000, max_len=4_096, max_body_bytes=8 << 20)
    answer = await gateway.post(prompt=["ab1 " * 100] * 1_000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert 0 < len(encoded) < 200
    refused = await gateway.post(prompt="ab1 " * 100, max_tokens=1, n=8)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "for 8 choices" in refused.json()["error"]["message"]
    assert gateway.queue.admitted == []


async def test_many_short_texts_do_not_hold_the_loop(start, encoded):
    """Each of them is tokenized at once; all of them would take seconds."""
    gateway = await start(max_len=4_096, max_body_bytes=8 << 20)
    gateway.says([5])
    wanted = gateway.ids("the fox " * 100)
    encoded.clear()
    assert (await gateway.post(prompt=["the fox " * 100] * 64, max_tokens=1)).status_code == 200
    assert [request.token_ids for request in gateway.queue.admitted] == [wanted] * 64
    assert encoded
    assert threading.main_thread() not in {thread for _, thread in encoded}
