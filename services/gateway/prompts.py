"""What clients ask to be continued, as token ids: texts through the tokenizer, messages through the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from services.gateway.chat_prompt import ChatEncoder
from services.gateway.chat_template import ChatTemplate
from services.gateway.conversation import Conversation
from services.gateway.schema import ChatMessage, CompletionBody
from services.gateway.tokenizer import TextCodec
from services.messages import WorkerInfo

_INLINE_CHARS = 4096  # longer texts are tokenized in a thread, so that open streams go on
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
    """``text`` is the prompt as the client wrote it; None where it wrote token ids."""

    token_ids: list[int]
    text: str | None = None


class PromptReader:
    """Reads prompts for one model. ``workers`` tells who serves it now."""

    def __init__(self, model: ServedModel, workers: Callable[[], Sequence[WorkerInfo]]) -> None:
        self.model = model
        self._workers = workers
        self._chat = None if model.template is None else ChatEncoder(model.template, model.codec, self._check_messages)

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

    async def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of ``body`` in their order."""
        return [await self._prompt(item, body.add_special_tokens is not False) for item in body.prompts]

    async def of_messages(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool | None,
        options: Mapping[str, Any] | None,
        parse_special_tokens: bool | None,
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
        encode = partial(self._chat.token_ids, chat, parse_special_tokens=parse_special_tokens or False)
        short = sum(map(len, chat.texts())) + _MESSAGE_CHARS * len(messages) <= _INLINE_CHARS
        return Prompt(token_ids=encode() if short else await asyncio.to_thread(encode))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        if len(text) <= _INLINE_CHARS:
            return self.model.codec.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.model.codec.encode, text, add_special_tokens=add_special_tokens)

    async def _prompt(self, item: str | list[int], add_special_tokens: bool) -> Prompt:
        if not isinstance(item, str):
            return Prompt(token_ids=item)
        self._check_fits(item, "prompt")
        return Prompt(token_ids=await self.encode(item, add_special_tokens=add_special_tokens), text=item)

    def _check_messages(self, text: str) -> None:
        self._check_fits(text, "messages")

    def _check_fits(self, text: str, param: str) -> None:
        """Refuses a text that cannot fit before time is spent on tokenizing it."""
        fewest = len(text) // self.model.codec.longest_token
        if fewest > self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has at least {fewest} tokens; the context holds {self.max_model_len}.",
                hint="Shorten it.",
                param=param,
            )
