"""Small tokenizers of the kinds that checkpoints have, each with a chat template that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from services.gateway.chat_template import ChatTemplate
from services.gateway.tokenizer import SpecialTokens, TextCodec

START, END = "<|im_start|>", "<|im_end|>"
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{% set text = m.content %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{{- '<think>\n' + text.split('</think>')[0].split('<think>')[-1].strip() + '\n</think>\n\n' }}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- text | trim }}{{- '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
RESTARTS = "{% for m in messages %}{{ m.role + ':' + bos_token + m.content + eos_token }}{% endfor %}"
TEXTS = ["The quick brown fox jumps over the lazy dog. Hello, hello there, world! the end im start"] * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A tokenizer, the strings of its control tokens, and templates for it.

    ``verbatim``: any text can be decoded. ``spaced``: it puts a space before a text and then looks for control tokens.
    """

    tokenizer: Tokenizer
    controls: tuple[str, ...]
    templates: tuple[str, ...]
    verbatim: bool = True
    spaced: bool = False
    special: SpecialTokens = field(default_factory=SpecialTokens)

    @property
    def codec(self) -> TextCodec:
        return TextCodec(self.tokenizer, self.special)

    def template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.special)

    def in_transformers(self, source: str) -> PreTrainedTokenizerFast:
        named = {name: value for name in ("bos_token", "eos_token") if (value := getattr(self.special, name))}
        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, chat_template=source, **named)


def byte_level() -> Kind:
    """Bytes, words by an expression, NFC; control tokens beside tokens that only look like them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    controls = ("<|endoftext|>", START, END, "<|end|>", "<｜sep｜>")
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), "</think>"])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in controls])
    tokenizer.add_tokens(["<tool_call>"])
    return Kind(tokenizer=tokenizer, controls=controls, templates=(TURNS, THINKING))


def in_vocabulary() -> Kind:
    """Bytes, with the control tokens in the model's own vocabulary and a gap in its ids, as of models that were cut."""
    controls = ("<|endoftext|>", START, END)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*controls, *letters])} | {"th": 263, "the": 264}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(controls))
    tokenizer.add_tokens(["<think>", AddedToken("</think>", lstrip=True, rstrip=True, normalized=False)])
    return Kind(tokenizer=tokenizer, controls=controls, templates=(TURNS, THINKING))


def sentence_pieces(*, prefix: bool = True, normalized: bool = False) -> Kind:
    """Pieces with U+2581 for spaces and bytes for what is unknown, whose merges can make ``</s>`` by themselves.

    ``prefix``: a space before every stretch of text (else before the first). ``normalized``: ``<s>`` and ``</s>`` are
    looked for after that, so that they are found at the start of a stretch alone.
    """
    controls = ("<s>", "</s>", "[INST]", "[/INST]")
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("s", ">"), ("<", "/"), ("</", "s>"), ("▁", "<"), ("e", "n")]
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]
    known = dict.fromkeys(["<unk>", *controls, *letters, *("".join(merge) for merge in merges)])
    vocabulary = {text: index for index, text in enumerate(known)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=normalized and "s" in text, special=True) for text in ("<unk>", *controls)]
    )
    special = SpecialTokens(bos_token="<s>", eos_token="</s>")
    return Kind(
        tokenizer=tokenizer,
        controls=controls,
        templates=(INSTRUCTIONS, RESTARTS),
        spaced=prefix and normalized,
        special=special,
    )


def unigram() -> Kind:
    """Pieces by likelihood after NFKC and in small letters; so are control tokens, of which one swallows spaces."""
    controls = ("<s>", "</s>", "<turn>")
    pieces = [("<unk>", 0.0), *((text, 0.0) for text in controls), ("▁", -2.0), ("▁the", -3.0)]
    pieces += [(chr(code), -4.0) for code in range(0x21, 0x7F)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=True, rstrip=text == "<turn>", lstrip=text == "<turn>") for text in controls]
    )
    tokenizer.add_special_tokens(["<unk>"])
    source = (
        "{{ bos_token }}{% for m in messages %}{{ '<turn>' + m.role + ': ' + m.content + eos_token }}{% endfor %}<turn>"
    )
    special = SpecialTokens(bos_token="<s>", eos_token="</s>")
    return Kind(tokenizer=tokenizer, controls=controls, templates=(source,), verbatim=False, special=special)


KINDS: dict[str, Callable[[], Kind]] = {
    "byte-level": byte_level,
    "in-vocabulary": in_vocabulary,
    "pieces": sentence_pieces,
    "pieces-first": lambda: sentence_pieces(prefix=False),
    "pieces-normalized": lambda: sentence_pieces(normalized=True),
    "unigram": unigram,
}
