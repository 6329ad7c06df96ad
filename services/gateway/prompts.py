"""Prompts of clients in, token ids out: texts go through the tokenizer, messages through the chat template first.

:class:`Fits` finds out whether a text fits into the context without tokenizing much more of it than fits.
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
from services.gateway.chat_template import RESERVED, ChatTemplate
from services.gateway.conversation import Conversation
from services.gateway.harmony import Marks
from services.gateway.offload import Offload
from services.gateway.schema import ChatMessage, CompletionBody
from services.gateway.tokenizer import TextCodec
from services.gateway.tool_calls import Arguments
from services.messages import WorkerInfo

T = TypeVar("T")

_INLINE_CHARS = 4096  # longer texts are tokenized in a thread, so that open streams go on
_TOGETHER_CHARS = 64 * 1024  # short texts that go to a thread together
_LONG_CHARS = 128 * 1024  # longer texts keep a thread for longer than others should wait
_MESSAGE_CHARS = 64  # rendering a message takes as long as tokenizing so many characters


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as clients see it. ``max_len`` counts prompt and answer, in tokens; ``created`` is Unix seconds;
    ``marks`` are those of a model whose answers have channels."""

    name: str
    vocab_size: int
    max_len: int
    codec: TextCodec
    template: ChatTemplate | None
    created: int
    marks: Marks | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A tokenized prompt. ``text`` is the client's text; None where it sent token ids. Ids are in an array while the
    request waits for Redis: a list of them would be ten times as large as the body."""

    token_ids: array[int]
    text: str | None = None


class PromptReader:
    """Reads prompts for one model. ``workers`` returns the workers that serve it now."""

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
        """Raises ModelNotFound unless ``name`` is None or the name of the served model."""
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
        """Returns how many tokens fit after the longest prompt; 1 if none does, so that the length check refuses it."""
        return max(1, self.max_model_len - max(len(prompt.token_ids) for prompt in prompts))

    async def of_completion(self, body: CompletionBody, tenant: str, max_tokens: int) -> list[Prompt]:
        """Returns the prompts of ``body`` in their order. Raises InvalidRequest as soon as they have over
        ``max_tokens``, times the ``n`` choices, all together."""
        prompts: list[Prompt] = []
        tokens = 0
        for piece in _together(body.prompts):
            prompts += await self._prompts(piece, tenant, add_special_tokens=body.add_special_tokens is not False)
            tokens += sum(len(prompt.token_ids) for prompt in prompts[-len(piece) :])
            if tokens * (body.n or 1) > max_tokens:
                raise InvalidRequest(
                    f"The prompts, for {body.n or 1} choices each, have at least {tokens * (body.n or 1)} tokens; "
                    f"the maximum is {max_tokens}.",
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
        """Returns the prompt of ``messages``, by the checkpoint's chat template. Raises InvalidRequest if it has none.

        Control tokens in messages and ``options`` stay text, unless ``parse_special_tokens`` is true.
        """
        if self._chat is None:
            raise InvalidRequest(
                f"The model {self.model.name!r} has no chat template.",
                hint="Use /v1/completions, or add chat_template.jinja to the checkpoint.",
                param="messages",
            )
        options = options or {}
        if taken := next(filter(RESERVED.__contains__, options), None):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {taken!r}, which the server and the checkpoint provide.",
                hint="Leave it out; messages and add_generation_prompt are fields of the request.",
                param=f"chat_template_kwargs.{taken}",
            )
        chat_encoder, parse = self._chat, parse_special_tokens or False

        def encode() -> array[int]:
            arguments = Arguments().read
            chat = Conversation(
                messages=[message.as_template_input(arguments) for message in messages],
                add_generation_prompt=add_generation_prompt is not False,
                options=options,
            )
            return array("i", chat_encoder.token_ids(chat, parse_special_tokens=parse))

        chars = sum(map(_message_chars, messages)) + sum(map(_option_chars, options.values()))
        return Prompt(token_ids=await self._run(encode, chars, tenant))

    async def encode(self, text: str, tenant: str, *, add_special_tokens: bool) -> array[int]:
        """Returns token ids of ``text``, also where they exceed the context. Raises ContextLengthExceeded where that
        would take long."""

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


def _message_chars(message: ChatMessage) -> int:
    """Returns how many characters take as long to tokenize as ``message`` does, its rendering included."""
    content, calls = message.content, message.tool_calls or ()
    said = len(content) if isinstance(content, str) else sum(len(part.text) for part in content or ())
    called = sum(len(call.function.arguments or "") + len(call.function.name) + len(call.id or "") for call in calls)
    said += len(message.thoughts)
    return said + called + len(message.name or "") + _MESSAGE_CHARS * (1 + len(calls))


def _option_chars(value: object) -> int:
    return len(value) if isinstance(value, str) else 0


def _chars(item: str | array[int]) -> int:
    return len(item) if isinstance(item, str) else 0


def _together(items: Sequence[str | array[int]]) -> Iterator[Sequence[str | array[int]]]:
    """Yields ``items`` in order: short texts in groups that take a thread some milliseconds, each long text alone."""
    start, chars = 0, 0
    for at, item in enumerate(items):
        if at > start and chars + _chars(item) > _TOGETHER_CHARS:
            yield items[start:at]
            start, chars = at, 0
        chars += _chars(item)
    yield items[start:]


_PIECE_CHARS = 128 * 1024
"""Texts up to this length are tokenized whole. Tokenizing takes up to 0.4 KB of memory for each character (digits; 0.08
for prose), so at most 50 MB."""
_MAX_CHARS = 1024 * 1024
_MAX_CHARS_A_TOKEN = 8
"""Texts longer than both bounds allow are not tokenized at all, though they may fit: each character takes 0.6 us and up
to 0.15 KB, and other clients' long texts wait. A token of prose and code has three to five characters; texts with more
than eight are white space or repetitions."""
_SAMPLES = 16
_SAMPLE_CHARS = 1024
_SURELY = 0.9
"""A text with at most this share of the context by its samples is tokenized whole. Samples are taken at random, so that
no client can write a text that is sparse just there."""
_SLACK = 256
"""The number of tokens by which a cut may raise the count. A token depends on its neighbours, so a cut changes a few
tokens next to it; mostly none at a space, where :func:`_cut` looks for one. The maximum is for tokenizers that make one
token of a long unknown word: they look at a hundred letters of it, and may know its beginning. A text is refused when
its pieces exceed the context by this for each cut, which no text that fits does."""
_SEARCHED = 1024  # characters before the place of a cut
_BEFORE_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)


class Fits:
    """Checks texts for one tokenizer. ``context`` returns the number of tokens that fit."""

    def __init__(self, codec: TextCodec, context: Callable[[], int]) -> None:
        self._codec = codec
        self._context = context
        self._random = random.Random()
        # Other tokenizers drop characters that they do not know, or make one token of any number of them.
        self._knows_all = codec.byte_level or bool(getattr(codec.tokenizer.model, "byte_fallback", False))

    def short(self, text: str) -> bool:
        """Says whether ``text`` may be tokenized without :meth:`check`."""
        return len(text) <= _PIECE_CHARS

    def check(self, text: str, param: str) -> None:
        """Raises ContextLengthExceeded, naming ``param``, where ``text`` cannot fit. Takes as long as tokenizing what
        fits of the text, or a sample of it: call it in a thread, unless the text is short."""
        self._refuse_long(text, param)
        if self._knows_all:
            self._refuse(len(text) // self._codec.longest_token, param)
        if self.short(text) or self._estimate(text) <= _SURELY * self._context():
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
        limit = max(_MAX_CHARS, _MAX_CHARS_A_TOKEN * self._context())
        if len(text) > limit:
            raise ContextLengthExceeded(
                f"The prompt has {len(text)} characters; the maximum for this context is {limit}.",
                hint="Shorten it, or send token ids.",
                param=param,
            )

    def _refuse(self, minimum: int, param: str) -> None:
        context = self._context()
        if minimum > context:
            raise ContextLengthExceeded(
                f"The prompt has at least {minimum} tokens; the context holds {context}.",
                hint="Shorten it.",
                param=param,
            )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start, start + _PIECE_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, start: int, end: int) -> int:
    """Returns a place before ``end`` where a space follows another character, if there is one near; else ``end``."""
    if end >= len(text):
        return len(text)
    found = _BEFORE_SPACE.match(text, max(start + 1, end - _SEARCHED), end)
    return found.end() if found is not None else end
