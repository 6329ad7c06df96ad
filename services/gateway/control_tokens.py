"""Control tokens: which tokens they are, where they stand in a text, and how text without any is encoded.

A tokenizer makes a control token wherever it finds the token's string, whoever wrote it. So prompts come here in
pieces: the control tokens of the template as ids, everything else as text, in which none is looked for.

Control tokens are the tokens that the checkpoint calls special, except the one for unknown characters. Other added
tokens (``<think>``, ``<tool_call>``) are found in any text: clients send back assistants' turns that hold them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer, models

from services.errors import InvalidRequest
from services.gateway.tokenizer import TextCodec, failures_as, untokenizable

_UNKNOWN = "\U0010fffd"  # of a plane for private use: in no vocabulary


class Span(NamedTuple):
    """The characters from ``start`` to before ``end``; they become the control token ``token_id``."""

    start: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of one tokenizer, by their ``strings`` and their ``ids``."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        added = codec.tokenizer.get_added_tokens_decoder()
        special = codec.special_ids - _unknown_ids(codec)
        spellings = {token_id: _spelling(codec, added[token_id].content, special) for token_id in special}
        # A token that the model makes of its characters, and that cannot be written otherwise, is text.
        self.ids = frozenset(token_id for token_id, ids in spellings.items() if ids != [])
        self.strings = tuple(added[token_id].content for token_id in sorted(self.ids))
        by_model = {token_id: ids for token_id, ids in spellings.items() if ids}
        self._plain = _PlainText(codec, [token for i, token in sorted(added.items()) if i not in self.ids], by_model)
        exact = not by_model and not any(added[token_id].normalized for token_id in self.ids)
        self._finder = _scanner(added.values()) if exact else codec.tokenizer
        self._found = {_known(self._finder, added[token_id].content): token_id for token_id in self.ids}

    def among(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the control tokens in ``token_ids``, in their order."""
        controls = self.ids
        return [token_id for token_id in token_ids if token_id in controls]

    def spans(self, text: str) -> list[Span]:
        """Returns where the tokenizer finds control tokens in ``text``; they include white space that they swallow."""
        with failures_as(untokenizable):
            encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        found = [(index, self._found.get(token_id)) for index, token_id in enumerate(encoding.ids)]
        return [Span(*_place(encoding, index), token_id) for index, token_id in found if token_id is not None]

    def encode(self, pieces: Sequence[str | int]) -> list[int]:
        """Returns token ids of ``pieces``, texts and ids of control tokens; no text becomes a control token.

        Where no text spells a control token, the ids equal those of one joined text. There is one exception: some
        tokenizers add a space to a text; here the text after each control token gets that space, too.
        """
        return self._plain.encode(pieces)


class _PlainText:
    """The tokenizer without its control tokens; one mark stands for each of them."""

    def __init__(self, codec: TextCodec, added: Sequence[AddedToken], by_model: dict[int, list[int]]) -> None:
        """``by_model`` has the control tokens that the model makes of text by itself, and the ids to write instead."""
        tokenizer = codec.tokenizer
        self._mark = f"{_UNKNOWN}{secrets.token_hex(16)}"  # no client can guess it
        self._tokenizer = Tokenizer(tokenizer.model)  # the two share the model, so this one takes little memory
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        self._tokenizer.add_tokens([*_fillers(tokenizer, self._mark), AddedToken(self._mark, normalized=False), *added])
        self._mark_id = self._tokenizer.token_to_id(self._mark)
        moved = {_known(self._tokenizer, token.content): [_known(tokenizer, token.content)] for token in added}
        self._instead = by_model | moved

    def encode(self, pieces: Sequence[str | int]) -> list[int]:
        text = "".join(self._mark if isinstance(piece, int) else piece for piece in pieces)
        controls = (piece for piece in pieces if isinstance(piece, int))
        with failures_as(untokenizable):
            found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        token_ids: list[int] = []
        for token_id in found:
            if token_id == self._mark_id:
                token_ids.append(next(controls))
            elif token_id in self._instead:
                token_ids.extend(self._instead[token_id])
            else:
                token_ids.append(token_id)
        return token_ids


def _unknown_ids(codec: TextCodec) -> set[int]:
    """Returns ids of the token for characters that the tokenizer does not know: any text may hold such characters."""
    named = getattr(codec.tokenizer.model, "unk_token", None)
    found = set() if named is None else {_known(codec.tokenizer, named)}
    with suppress(InvalidRequest):  # it has no such token, and fails on such characters
        found.update(codec.encode(_UNKNOWN, add_special_tokens=False))
    return found


def _spelling(codec: TextCodec, string: str, special: Collection[int]) -> list[int] | None:
    """Returns ids of ``string`` as mere text where the model makes a special token of it by itself, else None.

    Some models have merges that end in ``</s>``, or know it as a piece. The ids are empty where the string can be
    written in no other way.
    """
    tokenize, word = codec.tokenizer.model.tokenize, codec.in_alphabet(string)
    if [token.id for token in tokenize(word)] != [codec.tokenizer.token_to_id(string)]:
        return None
    cuts = ([token.id for part in (word[:cut], word[cut:]) for token in tokenize(part)] for cut in range(1, len(word)))
    return next((ids for ids in cuts if not set(ids).intersection(special)), [])


def _fillers(tokenizer: Tokenizer, mark: str) -> list[str]:
    """Returns tokens to add first where the vocabulary leaves ids out, so that no later token gets one of its ids."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return [f"{mark}{missing}" for missing in range(1 + max(vocabulary.values(), default=-1) - len(vocabulary))]


def _scanner(added: Iterable[AddedToken]) -> Tokenizer:
    """Returns a tokenizer that finds added tokens and makes one unknown token of the text between two of them."""
    scanner = Tokenizer(models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
    scanner.add_tokens(list(added))
    return scanner


def _place(encoding: Encoding, index: int) -> tuple[int, int]:
    """Returns the characters of the token at ``index``, which stands in the text."""
    place: tuple[int, int] | None = encoding.token_to_chars(index)
    assert place is not None
    return place


def _known(tokenizer: Tokenizer, string: str) -> int:
    """Returns the id of the token ``string``, which ``tokenizer`` has."""
    token_id = tokenizer.token_to_id(string)
    assert token_id is not None
    return token_id
