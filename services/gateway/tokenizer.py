"""Text in, token ids out, and single tokens rendered. It needs no torch, and reads the checkpoint's tokenizer.json.

The rest of the gateway handles text through :class:`TextCodec` alone; ``detokenize.py`` makes text of token streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders

from services.errors import CheckpointError, InvalidRequest
from services.model.load_spec import tokenizer_file

_MAX_FILE_BYTES = 256 << 20
_MAX_IDS = 1 << 21
"""Ids that a tokenizer may have, with gaps: ids are handled in four bytes, and each gap takes memory."""
_MAX_ADDED = 1 << 17
"""Added tokens that a tokenizer may have. Each takes up to 0.1 ms and 3 KB at the start."""
_TRIAL = "Hello, world 1"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte behind every character of a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are shifted to U+0100 and up.

    >>> _byte_alphabet()["Ġ"] == ord(" ")
    True
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


@contextmanager
def failures_as(typed: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Raises failures of the tokenizers library as ``typed`` makes them. The library is written in Rust, and its panics
    are no subclass of Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise typed(error) from error
        raise


def untokenizable(error: BaseException) -> InvalidRequest:
    """Returns the error for a text that the library fails on, such as one for which an expression takes too long."""
    return InvalidRequest(f"The model's tokenizer fails on this text: {error}.", hint="Change it, or send token ids.")


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Named special tokens of ``tokenizer_config.json``, as strings for the chat template and ``/tokenizer_info``."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class TextCodec:
    """Encodes prompts and renders single tokens: of byte-level vocabularies by a table, of others by the library."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens) -> None:
        self.tokenizer = tokenizer
        self.special = special
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._alphabet = _byte_alphabet()
        self._chars = {byte: char for char, byte in self._alphabet.items()}
        self._bytes: dict[int, bytes] = {}
        self.longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids of ``text``. Other threads can run meanwhile, so encode long texts in a thread.

        Raises:
            InvalidRequest: the library fails on ``text``.
        """
        # Only the library's calls for batches release the interpreter's lock; "fast" leaves offsets out.
        with failures_as(untokenizable):
            return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that ``token_id`` adds to a text, maybe part of a character. Unknown ids add none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._render(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Returns ``token_id``'s name in log-probabilities: its text, or ``bytes:\\x..`` where that is not whole UTF-8.

        Ids that the model has and the tokenizer has not (padding of the vocabulary) are ``token_id:N``.
        """
        raw = self.token_bytes(token_id)
        if not raw and self.tokenizer.id_to_token(token_id) is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def special_at(self, token_id: int, text: bytes, at: int) -> str:
        """Returns the string of the special token ``token_id`` if ``text``, in UTF-8, spells it at ``at``, else ''."""
        spelled = self.tokenizer.id_to_token(token_id) if token_id in self.special_ids else None
        return spelled if spelled and text.startswith(spelled.encode(), at) else ""

    def in_alphabet(self, text: str) -> str:
        """Returns ``text`` as the model's vocabulary spells it."""
        return "".join(self._chars[byte] for byte in text.encode()) if self.byte_level else text

    def _render(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return self._from_alphabet(token)
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        # The text that the token adds after itself: decoders strip or insert spaces only at the start of a text.
        once = self.decode([token_id])
        return self.decode([token_id, token_id])[len(once) :].encode()

    def _from_alphabet(self, token: str) -> bytes:
        try:
            return bytes(self._alphabet[char] for char in token)
        except KeyError:  # an added token is spelled as it is, outside the byte alphabet
            return token.encode()


def _token_string(value: object) -> str | None:
    """Returns a token in ``tokenizer_config.json``: a string, or an object with ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def read_tokenizer_config(model_dir: Path) -> dict[str, object]:
    """Returns ``tokenizer_config.json`` of the checkpoint; empty where there is none.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a JSON object: {error}.", hint="Download the checkpoint again."
        ) from error


def load_codec(model_dir: Path, config: dict[str, object]) -> TextCodec:
    """Loads the checkpoint's tokenizer with the named special tokens of ``config`` (see :func:`read_tokenizer_config`).

    Raises:
        CheckpointError: ``tokenizer.json`` is missing, damaged or too large.
    """
    path = tokenizer_file(model_dir)
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise CheckpointError(f"{path} has more than {_MAX_FILE_BYTES:,} bytes.", hint="Download the checkpoint again.")
    with failures_as(lambda error: _unusable(path, f"cannot be read: {error}")):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_tokenizer(path, tokenizer)
    names: Iterable[str] = SpecialTokens.__struct_fields__
    return TextCodec(tokenizer, SpecialTokens(**{name: _token_string(config.get(name)) for name in names}))


def _check_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where ``tokenizer`` cannot be used: it has too many tokens, or fails on any text."""
    if (added := len(tokenizer.get_added_tokens_decoder())) > _MAX_ADDED:
        raise _unusable(path, f"has {added:,} added tokens; the maximum is {_MAX_ADDED:,}")
    with failures_as(lambda error: _unusable(path, f"cannot be used: {error}")):
        used = tokenizer.encode(_TRIAL).ids
    if (largest := max([*tokenizer.get_vocab().values(), *used], default=0)) >= _MAX_IDS:
        raise _unusable(path, f"has the token id {largest:,}; {_MAX_IDS - 1:,} is the largest possible")


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} {reason}.", hint="Download the checkpoint again.")
