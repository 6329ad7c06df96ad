"""What clients ask to be continued, as token ids: texts through the tokenizer, messages through the chat template.

:class:`Fits` finds out whether a text fits into the context without tokenizing much more than fits, or for long.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from services.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from services.gateway.chat_prompt import ChatEncoder
from services.gateway.chat_template import ChatTemplate
from services.gateway.conversation import Conversation
from services.gateway.offload import Offload
from services.gateway.schema import ChatMessage, CompletionBody
from services.gateway.tokenizer import TextCodec
from services.messages import WorkerInfo

T = TypeVar("T")

_INLINE_CHARS = 4096  # more are tokenized in a thread, so that open streams go on
_TOGETHER_CHARS = 64 * 1024  # of short texts that go there together
_LONG_CHARS = 128 * 1024  # keeps a thread for longer than others should wait
_MESSAGE_CHARS = 64  # what the template does with a message takes as long as tokenizing these


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as clients see it. ``max_len`` counts prompt and answer, in tokens; ``created`` is Unix seconds."""

    name: str
    vocab_size: int
    max_len: int
    codec: TextCodec
    template: ChatTemplate | None
    created: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """``text`` is the prompt as the client wrote it; None where it wrote token ids. Ids take 4 bytes each for as
    long as the request waits for Redis: a list of them would be ten times as large as the body."""

    token_ids: array[int]
    text: str | None = None


class PromptReader:
    """Reads prompts for one model. ``workers`` tells who serves it now."""

    def __init__(self, model: ServedModel, workers: Callable[[], Sequence[WorkerInfo]], offload: Offload) -> None:
        self.model = model
        self._workers = workers
        self._offload = offload
        self._fits = Fits(model.codec, lambda: self.max_model_len)
        check = partial(self._fits.check, param="messages")
        self._chat = None if model.template is None else ChatEncoder(model.template, model.codec, check)

    @property
    def max_model_len(self) -> int:
        """The shortest context among the live workers and the model itself."""
        return min([self.model.max_len, *(worker.max_model_len for worker in self._workers())])

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless ``name`` is the served model's or None."""
        if name is not None and name != self.model.name:
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist here.", hint=f"Use {self.model.name!r}.", param="model"
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest, naming ``param``, where a token id is beyond the model's vocabulary."""
        worst, vocabulary = max(token_ids, default=0), self.model.vocab_size
        if worst >= vocabulary:
            raise InvalidRequest(
                f"{param} has the token id {worst}; the model knows 0 to {vocabulary - 1}.",
                hint="Use this model's own tokenizer.",
                param=param,
            )

    def room_after(self, prompts: Sequence[Prompt]) -> int:
        """Tokens that fit after the longest prompt; 1 where none does, so that the length check names it."""
        return max(1, self.max_model_len - max(len(prompt.token_ids) for prompt in prompts))

    async def of_completion(self, body: CompletionBody, tenant: str, most_tokens: int) -> list[Prompt]:
        """The prompts of ``body`` in their order. Raises InvalidRequest where all together, for each of the ``n``
        choices, have over ``most_tokens``: as soon as that is known."""
        prompts: list[Prompt] = []
        tokens = 0
        for piece in _together(body.prompts):
            prompts += await self._prompts(piece, tenant, add_special_tokens=body.add_special_tokens is not False)
            tokens += sum(len(prompt.token_ids) for prompt in prompts[-len(piece) :])
            if tokens * (body.n or 1) > most_tokens:
                raise InvalidRequest(
                    f"The prompts, for {body.n or 1} choices each, have at least {tokens * (body.n or 1)} tokens; "
                    f"{most_tokens} are the most.",
                    hint="Split the request.",
                    param="prompt",
                )
        return prompts

    async def of_messages(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool | None,
        options: Mapping[str, Any] | None,
        parse_special_tokens: bool | None,
        tenant: str,
    ) -> Prompt:
        """``messages`` through the checkpoint's chat template. Raises InvalidRequest where it has none.

        What is in messages and ``options`` stays text, unless ``parse_special_tokens`` is true.
        """
        if self._chat is None:
            raise InvalidRequest(
                f"The model {self.model.name!r} has no chat template.",
                hint="Use /v1/completions, or add chat_template.jinja to the checkpoint.",
                param="messages",
            )
        chat = Conversation(
            messages=[message.as_template_input() for message in messages],
            add_generation_prompt=add_generation_prompt is not False,
            options=options or {},
        )
        chat_encoder, parse = self._chat, parse_special_tokens or False

        def encode() -> array[int]:
            return array("i", chat_encoder.token_ids(chat, parse_special_tokens=parse))

        chars = sum(map(len, chat.texts())) + _MESSAGE_CHARS * len(messages)
        return Prompt(token_ids=await self._run(encode, chars, tenant))

    async def encode(self, text: str, tenant: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of ``text``, of more than fit, too: in an array, for there may be hundreds of thousands. Raises
        ContextLengthExceeded where that would take long."""

        def encode() -> array[int]:
            if not self._fits.short(text):
                self._fits.check(text, "prompt")
            return array("i", self.model.codec.encode(text, add_special_tokens=add_special_tokens))

        return await self._run(encode, len(text), tenant)

    async def _prompts(
        self, items: Sequence[str | array[int]], tenant: str, *, add_special_tokens: bool
    ) -> list[Prompt]:
        def encode() -> list[Prompt]:
            return [self._prompt(item, add_special_tokens) for item in items]

        return await self._run(encode, sum(_chars(item) for item in items), tenant)

    async def _run(self, encode: Callable[[], T], chars: int, tenant: str) -> T:
        if chars <= _INLINE_CHARS:
            return encode()
        return await self._offload.run(tenant, encode, releases_lock=True, long=chars > _LONG_CHARS)

    def _prompt(self, item: str | array[int], add_special_tokens: bool) -> Prompt:
        if not isinstance(item, str):
            return Prompt(token_ids=item)
        self._fits.check(item, "prompt")
        token_ids = self.model.codec.encode(item, add_special_tokens=add_special_tokens)
        return Prompt(token_ids=array("i", token_ids), text=item)


def _chars(item: str | array[int]) -> int:
    return len(item) if isinstance(item, str) else 0


def _together(items: Sequence[str | array[int]]) -> Iterator[Sequence[str | array[int]]]:
    """``items`` in their order: short texts in pieces that take a thread for some milliseconds, each long one alone."""
    start, chars = 0, 0
    for at, item in enumerate(items):
        if at > start and chars + _chars(item) > _TOGETHER_CHARS:
            yield items[start:at]
            start, chars = at, 0
        chars += _chars(item)
    yield items[start:]


_PIECE_CHARS = 128 * 1024
"""What is not longer is tokenized as it is. Tokenizing takes up to 0.4 KB for each character while it lasts (digits;
0.08 for prose), so this is 50 MB at most."""
_MAX_CHARS = 1024 * 1024
_MAX_CHARS_A_TOKEN = 8
"""A longer text is not tokenized at all, though it may fit: that takes 0.6 us and up to 0.15 KB for each character, and
nobody else's long text is tokenized meanwhile. Of prose and code a token has three to five characters; texts with more
than eight are white space, or one thing over and over."""
_SAMPLES = 16
_SAMPLE_CHARS = 1024
_SURELY = 0.9
"""Of the context: a text that has no more tokens by its samples is tokenized whole. They are taken at random, so that
nobody can write a text that is sparse where they are."""
_SLACK = 256
"""Tokens by which a cut may raise the count. Tokens are made of neighbours: of a word, or of characters whose merging
depends on what merges beside them. A cut therefore changes those beside it, and on: as far as one merge hangs on the
next, which is a few tokens; at a space, where :func:`_cut` looks for one, mostly none. The most are for tokenizers that
make one token of a long word that they do not know: its beginning may be known by its letters, of which they look at a
hundred. A text is refused when its pieces exceed the context by this for each cut, which no text does that fits."""
_SEARCHED = 1024  # characters before the place of a cut
_BEFORE_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)


class Fits:
    """For one tokenizer; ``most`` tells the tokens of the context."""

    def __init__(self, codec: TextCodec, most: Callable[[], int]) -> None:
        self._codec = codec
        self._most = most
        self._random = random.Random()
        # Others drop characters that they do not know, or make one token of any number of them.
        self._knows_all = codec.byte_level or bool(getattr(codec.tokenizer.model, "byte_fallback", False))

    def short(self, text: str) -> bool:
        """Whether ``text`` may be tokenized without :meth:`check`, whatever it is."""
        return len(text) <= _PIECE_CHARS

    def check(self, text: str, param: str) -> None:
        """Raises ContextLengthExceeded, naming ``param``, where ``text`` cannot fit. Takes as long as tokenizing so
        much of it as fits, or a sample of it: never on the event loop, unless the text is short."""
        self._refuse_long(text, param)
        if self._knows_all:
            self._refuse(len(text) // self._codec.longest_token, param)
        if self.short(text) or self._estimate(text) <= _SURELY * self._most():
            return
        found = 0
        for cuts, piece in enumerate(_pieces(text), 1):
            found += self._count(piece)
            self._refuse(found - cuts * _SLACK, param)

    def _estimate(self, text: str) -> float:
        starts = (self._random.randrange(len(text) - _SAMPLE_CHARS) for _ in range(_SAMPLES))
        sample = "\n".join(text[start : start + _SAMPLE_CHARS] for start in starts)
        return self._count(sample) * len(text) / len(sample)

    def _count(self, text: str) -> int:
        return len(self._codec.encode(text, add_special_tokens=False))

    def _refuse_long(self, text: str, param: str) -> None:
        most = max(_MAX_CHARS, _MAX_CHARS_A_TOKEN * self._most())
        if len(text) > most:
            raise ContextLengthExceeded(
                f"The prompt has {len(text)} characters; {most} are the most with this context.",
                hint="Shorten it, or send token ids.",
                param=param,
            )

    def _refuse(self, fewest: int, param: str) -> None:
        most = self._most()
        if fewest > most:
            raise ContextLengthExceeded(
                f"The prompt has at least {fewest} tokens; the context holds {most}.", hint="Shorten it.", param=param
            )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start, start + _PIECE_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, start: int, end: int) -> int:
    """A place up to ``end`` before a space and behind something else, if there is one near; else ``end``."""
    if end >= len(text):
        return len(text)
    found = _BEFORE_SPACE.match(text, max(start + 1, end - _SEARCHED), end)
    return found.end() if found is not None else end
