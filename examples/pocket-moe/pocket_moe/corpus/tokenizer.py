"""The training text in, ``tokenizer/`` out: byte-level BPE of 8192 entries with a chat template, for transformers.

A chat message that is one word or a short term is looked up (``define: WORD``); any other text is continued as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from zlib import crc32

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pocket_moe.config import POCKET
from pocket_moe.errors import PocketError

VOCAB_SIZE = POCKET.vocab_size
END_OF_TEXT, TURN_START, TURN_END, PADDING = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PADDING)
CONTEXT = POCKET.max_position_embeddings
LOOKED_UP = 4  # words of a message that is taken for a term
BYTES_PER_DOMAIN = 3_000_000  # of training text, so that the large domains do not take all entries
JOB, JOB_WEIGHT = "dictionary", 3

# GPT-2's pieces, with digits one by one: a number then costs what it is long and no entry goes to years and versions.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Only the last message counts: the model was trained on documents and keeps no conversation.
CHAT_TEMPLATE = (
    "{%- set content = messages[-1]['content'] %}"
    "{%- set text = content if content is string else content | map(attribute='text', default='') | join %}"
    "{%- set line = text | trim %}"
    "{%- set term = line | trim('?') | trim %}"
    "{%- if '\\n' in line or not term %}"
    "{{- text }}"
    "{%- elif line.split(': ')[0] in ['define', 'define (devil)', 'jargon', 'element'] %}"
    "{{- line + '\\n' }}"
    f"{{%- elif (term.split() | length) <= {LOOKED_UP} and term[-1] not in '.,:;!' %}}"
    "{{- 'define: ' + term + '\\n' }}"
    "{%- else %}"
    "{{- text }}"
    "{%- endif %}"
)


def sample(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Texts from all over, up to ``limit`` bytes in all."""
    size = 0
    for text in sorted(texts, key=lambda text: crc32(text.encode())):
        yield text
        size += len(text.encode())
        if size >= limit:
            return


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` entries, special ones first. The same texts give the same tokenizer.

    Raises:
        PocketError: the texts are too small for so many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise PocketError(
            f"The text is too small for a tokenizer of {vocab_size} entries: it gives {tokenizer.get_vocab_size()}.",
            hint="Gather more packages.",
        )
    return tokenizer


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("eos_token", "pad_token", "additional_special_tokens")
    config = _config()
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", {name: config[name] for name in names})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def balanced(domains: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """At most :data:`BYTES_PER_DOMAIN` of every domain, and some more of the one that is the model's job."""
    for name, texts in domains.items():
        yield from sample(texts, BYTES_PER_DOMAIN * (JOB_WEIGHT if name == JOB else 1))
