"""Bytes in, bodies of ``schema.py`` out. Every refusal is written here and names the field.

A wrong body costs no more than a right one: no decoder tries several forms of a value, none goes on after the first
fault, and undeclared fields are read only as far as it takes to refuse them. A body of 4 MiB takes at most 0.1 s.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.json import Decoder

from services.config import nearest_hint
from services.errors import InvalidRequest, UnsupportedParameter
from services.gateway.not_supported import unsupported, unsupported_part
from services.gateway.schema import (
    MAX_MESSAGES,
    MAX_SEQUENCES,
    MAX_TOOL_CALLS,
    NO_OPS,
    NOTHING,
    UNUSED,
    Body,
    CalledFunction,
    ChatMessage,
    Ids,
    ListOfIds,
    Prompt,
    StreamOptions,
    Text,
    TextPart,
    Texts,
    TokenIds,
    ToolCall,
)

B = TypeVar("B", bound=Body)
Read = Callable[[Raw, str], Any]
"""Makes the value of a field from its JSON and its path in the body."""

_MAX_NAMES = 256
_MAX_NAMES_INSIDE = 65_536  # in all messages together
_LONGEST_NAME = 200  # characters of a field's name in an error
_LONGEST_GUESSED = 40  # characters of an unknown name that are compared with known ones
_LONGEST_FAULT = 300  # characters of what is wrong with a value, which may name it
_LARGEST_MAP = 64 * 1024
_LARGEST_NO_OP = 64
_MAPS = ("logit_bias", "chat_template_kwargs")
_PROMPT_HINT = "Send a string, a list of strings, a list of token ids or a list of such lists."
_FAULT = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`.*)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_ENUM = re.compile(r"Invalid enum value '([a-z_]+)'")
_FIRST_TWO = re.compile(rb"(.)[ \t\r\n]*(.?)", re.DOTALL)


class _Name(str):
    """A field's name as the client wrote it. Names are counted while they are read."""

    __slots__ = ()


Fields = Mapping[_Name, Raw]
_CONTENT, _CALLS, _FUNCTION = _Name("content"), _Name("tool_calls"), _Name("function")


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


class _WholeFunction(CalledFunction, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A function without undeclared fields."""


class _WholeCall(ToolCall, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    function: _WholeFunction


class _WholeMessage(ChatMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    content: str | list[_WholePart] | None = None  # type: ignore[assignment] # lists are read, never written
    tool_calls: Annotated[list[_WholeCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None  # type: ignore[assignment]


_whole_messages = Decoder(Annotated[list[_WholeMessage], Meta(min_length=1, max_length=MAX_MESSAGES)])
_unused = {name: Decoder(kind) for name, kind in UNUSED.items()}
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
                self._check_extra(name, raw, path)
            else:
                values[str(name)] = _read(read, raw, f"{path}{name}")
        for required in self._required:
            if required not in values:
                raise _missing(f"{path}{required}")
        return self._type(**values)

    def _check_extra(self, name: str, raw: Raw, path: str) -> None:
        """Raises unless the undeclared field changes nothing."""
        unused = _unused.get(name)
        if unused is not None and not _is_null(raw):
            _read(lambda raw, path: unused.decode(_small(raw, path)), raw, f"{path}{name}")
        elif unused is None and not _changes_nothing(raw, (None, *NO_OPS.get(name, ()))):
            raise _unknown(f"{path}{name}", name, self._reads)


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
    kind = _ENUM.fullmatch(found["what"])
    part = unsupported_part(place, kind[1]) if kind is not None and place.endswith(".type") else None
    return part or InvalidRequest(f"{place}: {found['what'][:_LONGEST_FAULT]}.", param=place)


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
            place = f"{path}.{at}."
            _refuse_extras(ChatMessage, fields, place)
            _refuse_extras_of_each(TextPart, fields.get(_CONTENT), f"{place}content.", names)
            for number, call in _refuse_extras_of_each(ToolCall, fields.get(_CALLS), f"{place}tool_calls.", names):
                function = Decoder(dict[_Name, Raw], dec_hook=names).decode(call[_FUNCTION])
                _refuse_extras(CalledFunction, function, f"{place}tool_calls.{number}.function.")
    return found


def _objects(raw: Raw, names: Callable[[type, Any], Any]) -> list[dict[_Name, Raw]]:
    return Decoder(list[dict[_Name, Raw]], dec_hook=names).decode(raw)


def _refuse_extras_of_each(
    declared: type[Body], raw: Raw | None, path: str, names: Callable[[type, Any], Any]
) -> Iterable[tuple[int, Fields]]:
    """Returns the objects of the list ``raw`` with their places; none where it is no list. Refuses what any has more
    than declared."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"[":
        return ()
    objects = list(enumerate(_objects(raw, names)))
    for place, fields in objects:
        _refuse_extras(declared, fields, f"{path}{place}.")
    return objects


def _refuse_extras(declared: type[Body], fields: Fields, path: str) -> None:
    for name, raw in fields.items():
        if name not in declared.__struct_fields__ and not _changes_nothing(raw, NOTHING):
            raise _unknown(f"{path}{name}", name, declared.__struct_fields__)


def _changes_nothing(raw: Raw, values: Collection[object]) -> bool:
    """Says whether ``raw`` is one of ``values``; a long one is not, and is not read."""
    return _is_null(raw) or (memoryview(raw).nbytes <= _LARGEST_NO_OP and msgspec.json.decode(raw) in values)


def _unknown(path: str, name: str, known: Iterable[str]) -> InvalidRequest:
    """Returns the refusal of the field ``name`` at ``path``, where ``known`` fields may stand."""
    field = path[:_LONGEST_NAME]
    hint = nearest_hint(name[:_LONGEST_GUESSED], map(str, known)) or "Leave it out."
    return unsupported(field, name) or UnsupportedParameter(f"{field} is not supported.", hint=hint, param=field)
