"""Conversations in, token ids out, in which only the chat template's control tokens are control tokens.

The rendered text is tokenized in one piece, so without control tokens in messages the ids equal those of transformers.
The string of a control token in a message (``<|im_end|>``) stays text. Texts may also spell one only together, with
each other or with the template. This shows in the order of control tokens, which has to equal the order in the same
conversation without its words.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

import msgspec

from services.errors import InvalidRequest
from services.gateway.any_of import any_of
from services.gateway.chat_template import ChatTemplate
from services.gateway.control_tokens import ControlTokens, Span
from services.gateway.conversation import STAND_IN, Conversation, StandIns
from services.gateway.tokenizer import TextCodec

_REMEMBERED = 4096
_NO_STRING = "(?!)"
_LABEL = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # what ids of tool calls and names of functions are made of


class ChatEncoder:
    """Encodes conversations for one model. May be used by several threads."""

    def __init__(self, template: ChatTemplate, codec: TextCodec, check: Callable[[str], None]) -> None:
        """``check`` gets a rendered text before it is tokenized, and raises an error for a text that is too long."""
        self._template = template
        self._codec = codec
        self._check = check
        self._controls = ControlTokens(codec)
        strings = self._controls.strings
        spelled = any_of(strings) if strings else _NO_STRING
        self._spelled = re.compile(spelled)
        self._to_hide = re.compile(f"{spelled}|{STAND_IN}")
        self._strings = "\0".join(["", *strings, ""])
        self._longest = max(map(len, strings), default=0)
        self._a_word = StandIns(template.source).hide("a word")
        self._orders = _Orders()

    def token_ids(self, chat: Conversation, *, parse_special_tokens: bool = False) -> list[int]:
        """Returns the prompt for ``chat``. With ``parse_special_tokens`` control tokens that texts spell count as such.

        Raises:
            InvalidRequest: the template refuses the messages, or fails on them.
        """
        if parse_special_tokens:
            return self._joint(chat)
        spelled = any(map(self._spelled.search, chat.texts()))
        token_ids = self._around_spelled(chat) if spelled else self._joint_if_harmless(chat)
        return self._without_looking(chat) if token_ids is None else token_ids

    def _joint(self, chat: Conversation) -> list[int]:
        return self._codec.encode(self._render(chat), add_special_tokens=False)

    def _joint_if_harmless(self, chat: Conversation) -> list[int] | None:
        """Returns the ids of :meth:`_joint`; None where they have control tokens which are not the template's."""
        token_ids = self._joint(chat)
        return token_ids if self._as_without_words(chat, self._controls.among(token_ids)) else None

    def _around_spelled(self, chat: Conversation) -> list[int] | None:
        """Returns ids with stand-ins for control tokens that texts spell; None if texts still make control tokens."""
        stand_ins = StandIns(self._template.source)

        def change(text: str) -> str:
            return self._to_hide.sub(lambda found: stand_ins.hide(found[0]), text)

        text = self._render(chat.with_texts(change, change, change), stand_ins)
        spans = self._controls.spans(text)
        if not self._as_without_words(chat, [span.token_id for span in spans]):
            return None
        return self._encode(text, spans, stand_ins)

    def _without_looking(self, chat: Conversation) -> list[int]:
        """Returns ids with a stand-in for each whole text, so that the template cannot look into any."""
        stand_ins = StandIns(self._template.source)
        text = self._render(self._silenced(chat, stand_ins.hide), stand_ins)
        return self._encode(text, self._controls.spans(text), stand_ins)

    def _encode(self, text: str, spans: Sequence[Span], stand_ins: StandIns) -> list[int]:
        """Returns ids of ``text`` with control tokens at ``spans`` and nowhere else."""
        pieces: list[str | int] = []
        position = 0
        for span in spans:
            pieces += stand_ins.reveal(text[position : span.start]), span.token_id
            position = span.end
        return self._controls.encode([*pieces, stand_ins.reveal(text[position:])])

    def _render(self, chat: Conversation, stand_ins: StandIns | None = None) -> str:
        try:
            text = self._template.render(
                chat.messages, add_generation_prompt=chat.add_generation_prompt, options=chat.options
            )
        except InvalidRequest as error:
            shown = error.message if stand_ins is None else stand_ins.reveal(error.message)
            raise InvalidRequest(shown, param=error.param) from error
        self._check(text)
        return text

    def _as_without_words(self, chat: Conversation, controls: Sequence[int]) -> bool:
        """Says whether ``chat`` without words has the same ``controls``; true if the template refuses to render it."""
        silent = self._silenced(chat, lambda _text: self._a_word)
        key = _digest(msgspec.json.encode((silent.messages, silent.add_generation_prompt, silent.options)))
        expected = self._orders.get(key, lambda: self._order_in(silent))
        return expected is None or expected == _order(controls)

    def _order_in(self, chat: Conversation) -> bytes | None:
        try:
            text = self._render(chat)
        except InvalidRequest:
            return None
        return _order([span.token_id for span in self._controls.spans(text)])

    def _silenced(self, chat: Conversation, hide: Callable[[str], str]) -> Conversation:
        """Returns ``chat`` without words; white space stays, and so do options and labels that cannot be a part of a
        control token: templates look at the length of a call's id."""

        def said(text: str) -> str:
            return hide(text) if text.strip() or self._spelled.search(text) else text

        def option(text: str) -> str:
            return hide(text) if self._may_be_part(text) else text

        def label(text: str) -> str:
            return option(text) if _LABEL.fullmatch(text) else said(text)

        return chat.with_texts(said, option, label)

    def _may_be_part(self, text: str) -> bool:
        """Says whether ``text`` holds a control token's string or a stand-in, is inside one, or begins or ends one."""
        if not text or self._to_hide.search(text) or text in self._strings:
            return bool(text)
        lengths = range(1, min(len(text), self._longest))
        return any(
            f"{text[:length]}\0" in self._strings or f"\0{text[-length:]}" in self._strings for length in lengths
        )


class _Orders:
    """Remembers the order of control tokens for the latest kinds of conversations, both as digests."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._lock = Lock()

    def get(self, kind: bytes, find: Callable[[], bytes | None]) -> bytes | None:
        """Returns the result of ``find``, or its former result for the same ``kind``."""
        with self._lock:
            if kind in self._known:
                self._known.move_to_end(kind)
                return self._known[kind]
        order = find()
        with self._lock:
            self._known[kind] = order
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return order


def _order(controls: Sequence[int]) -> bytes:
    return _digest(array("q", controls).tobytes())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
