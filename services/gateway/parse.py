"""Bytes in, bodies of ``schema.py`` out. Every refusal is written here and names the field.

A wrong body costs no more than a right one: no decoder tries several forms of a value, none goes on after the first
fault, and undeclared fields are read only as far as it takes to refuse them. A body of 4 MiB takes at most 0.1 s.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.json import Decoder

from services.errors import InvalidRequest, UnsupportedParameter
from services.gateway.schema import (
    MAX_MESSAGES,
    MAX_SEQUENCES,
    NO_OPS,
    Body,
    ChatMessage,
    Ids,
    ListOfIds,
    Prompt,
    StreamOptions,
    Text,
    TextPart,
    Texts,
    TokenIds,
)

B = TypeVar("B", bound=Body)
Read = Callable[[Raw, str], Any]
"""Makes the value of a field from its JSON and its path in the body."""

_MAX_NAMES = 256
_MAX_NAMES_INSIDE = 65_536  # in all messages together
_LONGEST_NAME = 200  # characters of a field's name in an error
_LONGEST_FAULT = 300  # characters of what is wrong with a value, which may name it
_LARGEST_MAP = 64 * 1024
_LARGEST_NO_OP = 64
_MAPS = ("logit_bias", "chat_template_kwargs")
_PROMPT_HINT = "Send a string, a list of strings, a list of token ids or a list of such lists."
_FAULT = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`.*)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_FIRST_TWO = re.compile(rb"(.)[ \t\r\n]*(.?)", re.DOTALL)


class _Name(str):
    """A field's name as the client wrote it. Names are counted while they are read."""

    __slots__ = ()


Fields = Mapping[_Name, Raw]
_CONTENT = _Name("content")


def _counting(limit: int) -> Callable[[type, Any], Any]:
    """Returns a hook that makes up to ``limit`` names, so that half a million names cost as little as a few."""
    left = limit

    def make(kind: type, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise InvalidRequest(f"The body has over {limit} fields.", hint="Send the documented ones.")
        return kind(value)

    return make


def _fields(raw: Raw | bytes | bytearray) -> dict[_Name, Raw]:
    return Decoder(dict[_Name, Raw], dec_hook=_counting(_MAX_NAMES)).decode(raw)


class _WholePart(TextPart, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A part without undeclared fields, as nearly all parts are."""


class _WholeMessage(ChatMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    content: str | list[_WholePart] | None = None  # type: ignore[assignment] # lists are read, never written


_whole_messages = Decoder(Annotated[list[_WholeMessage], Meta(min_length=1, max_length=MAX_MESSAGES)])
_text, _texts, _ids, _lists_of_ids = Decoder(Text), Decoder(Texts), Decoder(Ids), Decoder(ListOfIds)


class Parser(Generic[B]):
    """Reads bodies of one type."""

    def __init__(self, body_type: type[B]) -> None:
        self._type = body_type
        self._reads = {field.name: _reader(field.name, field.type) for field in msgspec.structs.fields(body_type)}
        self._required = [field.name for field in msgspec.structs.fields(body_type) if field.required]

    def parse(self, raw: bytes | bytearray) -> B:
        """Returns the typed body in ``raw``.

        Raises:
            InvalidRequest: not JSON, or a field of the wrong type or range; ``param`` names the field.
            UnsupportedParameter: a field that this server does not implement.
        """
        try:
            return self.read(_fields(raw), "")
        except msgspec.ValidationError:
            raise InvalidRequest(
                "The body is not a JSON object.", hint='Send an object such as {"prompt": "Hello"}.'
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"The body is not valid JSON: {error}.", hint="Send UTF-8 JSON.") from None
        except RecursionError:
            raise InvalidRequest("The body is nested too deeply.", hint="Send the documented fields.") from None

    def read(self, fields: Fields, path: str) -> B:
        values: dict[str, Any] = {}
        for name, raw in fields.items():
            read = self._reads.get(name)
            if read is None:
                _refuse_extra(f"{path}{name}", name, raw)
            else:
                values[str(name)] = _read(read, raw, f"{path}{name}")
        for required in self._required:
            if required not in values:
                raise _missing(f"{path}{required}")
        return self._type(**values)


def _reader(name: str, kind: Any) -> Read:
    if kind == Prompt:
        return _prompt
    decode = Decoder(kind).decode
    if kind == TokenIds:
        return lambda raw, _path: array("i", decode(raw))
    if name == "messages":
        return lambda raw, path: _conversation(decode, raw, path)
    if name == "stream_options":
        inner = Parser(StreamOptions)
        return lambda raw, path: None if _is_null(raw) else inner.read(_fields(raw), f"{path}.")
    if name in _MAPS:
        return lambda raw, path: decode(_small(raw, path))
    return lambda raw, _path: decode(raw)


def _read(read: Read, raw: Raw, path: str) -> Any:
    try:
        return read(raw, path)
    except msgspec.ValidationError as error:
        raise _fault(path, error) from None


def _fault(path: str, error: msgspec.ValidationError) -> InvalidRequest:
    """Returns ``error`` with its place inside ``path``: ``$[1].text`` of ``content`` is ``content.1.text``."""
    found = _FAULT.fullmatch(str(error))
    assert found is not None, "the pattern takes any text"
    inside = (found["path"] or "").removeprefix("$").replace("[...]", "").replace("[", ".").replace("]", "")
    place = f"{path}{inside if inside.startswith('.') else ''}"
    if missing := _MISSING.fullmatch(found["what"]):
        return _missing(f"{place}.{missing[1]}")
    place = place[:_LONGEST_NAME]
    return InvalidRequest(f"{place}: {found['what'][:_LONGEST_FAULT]}.", param=place)


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is missing.", hint="Send it.", param=path)


def _is_null(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:5]) == b"null"


def _small(raw: Raw, path: str) -> Raw:
    """Returns ``raw``, if it is short: a map of thousands of entries would be built before they are counted."""
    if memoryview(raw).nbytes > _LARGEST_MAP:
        raise InvalidRequest(f"{path} exceeds {_LARGEST_MAP} bytes.", hint="Send fewer entries.", param=path)
    return raw


def _prompt(raw: Raw, path: str) -> Any:
    try:
        return _packed(_prompt_decoder(raw, path).decode(raw))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path} {_prompt_fault(str(error))}.", hint=_PROMPT_HINT, param=path) from None


def _packed(prompt: str | list[str] | list[int] | list[list[int]]) -> Any:
    """Returns ``prompt`` with token ids in arrays: 4 bytes each, where a list takes 36, while the body waits."""
    if isinstance(prompt, str) or isinstance(prompt[0], str):
        return prompt
    if isinstance(prompt[0], int):
        return array("i", prompt)
    return [array("i", ids) for ids in prompt]


def _prompt_decoder(raw: Raw, path: str) -> Decoder[Any]:
    """Returns the decoder that fits the first element, so that a wrong prompt is not read in each form in turn."""
    found = _FIRST_TWO.match(raw)
    first, second = found.groups() if found is not None else (b"", b"")
    if first != b"[":
        return _text
    if second != b"[":
        return _texts if second == b'"' else _ids
    if bytes(raw).count(b"[") > MAX_SEQUENCES + 1:
        raise InvalidRequest(f"{path} has over {MAX_SEQUENCES} lists.", hint="Split the request.", param=path)
    return _lists_of_ids


def _prompt_fault(fault: str) -> str:
    if "length >= 1" in fault:
        return "is empty"
    if ">= 0" in fault or "<= 2147483647" in fault or "out of range" in fault:
        return "has a token id out of range"
    return f"has over {MAX_SEQUENCES} texts" if "length <=" in fault else "has the wrong type"


def _conversation(decode: Callable[[Raw], Any], raw: Raw, path: str) -> Any:
    try:
        return _whole_messages.decode(raw)
    except msgspec.ValidationError:  # a fault, or an undeclared field that may change nothing
        found = decode(raw)
    if found is not None:
        names = _counting(_MAX_NAMES_INSIDE)
        for at, fields in enumerate(_objects(raw, names)):
            _refuse_extras(ChatMessage, fields, f"{path}.{at}.")
            content = fields.get(_CONTENT)
            if content is not None and bytes(memoryview(content)[:1]) == b"[":
                for place, part in enumerate(_objects(content, names)):
                    _refuse_extras(TextPart, part, f"{path}.{at}.content.{place}.")
    return found


def _objects(raw: Raw, names: Callable[[type, Any], Any]) -> list[dict[_Name, Raw]]:
    return Decoder(list[dict[_Name, Raw]], dec_hook=names).decode(raw)


def _refuse_extras(declared: type[Body], fields: Fields, path: str) -> None:
    for name, raw in fields.items():
        if name not in declared.__struct_fields__:
            _refuse_extra(f"{path}{name}", name, raw)


def _refuse_extra(path: str, name: str, raw: Raw) -> None:
    """Raises unless the undeclared field would change nothing."""
    if _is_null(raw):
        return
    harmless = memoryview(raw).nbytes <= _LARGEST_NO_OP and msgspec.json.decode(raw) in NO_OPS.get(name, ())
    if not harmless:
        field = path[:_LONGEST_NAME]
        raise UnsupportedParameter(f"{field} is not supported.", hint="Leave it out.", param=field)
