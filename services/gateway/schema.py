"""The bodies that clients may send. :mod:`services.gateway.parse` makes them from bytes.

A null means the default. An undeclared field is refused by name, unless its value changes nothing (null,
:data:`NO_OPS`, in messages :data:`NOTHING`) or no value of it does (:data:`UNUSED`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.queue.keys import DEFAULT_PRIORITY, PRIORITIES

MAX_CHOICES = 128
MAX_SEQUENCES = 1024
"""Prompts times choices of one request."""
MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
"""Calls of one message."""
_INT32 = 2**31 - 1
_INT64 = 2**63

NO_OPS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_obfuscation": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Parameters of OpenAI's API and its relatives that are not implemented, with the values that change nothing."""
NOTHING: tuple[object, ...] = (None, [], {}, "")
"""Values of undeclared fields in messages that say nothing: answers of other servers, sent back, are full of them."""

_Label = Annotated[str, Meta(max_length=1024)]
_Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]
UNUSED: dict[str, Any] = {
    "metadata": Annotated[_Metadata, Meta(max_length=16)],
    "prompt_cache_key": _Label,
    "safety_identifier": _Label,
    "service_tier": Literal["auto", "default", "flex", "priority", "scale"],
    "store": bool,
}
"""Parameters of OpenAI's API that change no answer whatever their value, with their types. They are checked, then
dropped: two bodies that differ in them alone ask for the same."""

TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIds = Sequence[TokenId]
"""Any number of token ids; the parser puts them into an array."""
Ids = Annotated[list[TokenId], Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_SEQUENCES)]
ListOfIds = Annotated[list[Ids], Meta(min_length=1, max_length=MAX_SEQUENCES)]
_FORMS = {"anyOf": [msgspec.json.schema(form) for form in (Text, Texts, Ids, ListOfIds)]}
Prompt = Annotated[Any, Meta(description="Text, token ids, or a list of either.", extra_json_schema=_FORMS)]
"""The first element decides which form a prompt has, so no decoder tries one form after the other."""
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
LogitBias = dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]]
Count = Annotated[int, Meta(ge=0, le=_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all request bodies. Types are strict; JSON has finite numbers only."""

    def canonical(self) -> bytes:
        """Returns the body as bytes, equal for bodies that differ in the order of their fields or in explicit nulls."""
        return msgspec.json.encode(self, enc_hook=array.tolist, order="deterministic")  # ids are in arrays


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: Annotated[bool | None, Meta(description="Send a last chunk with the token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: send the token counts so far in every chunk.")
    ] = None


class GenerationBody(Body, frozen=True, kw_only=True):
    """The fields that completions and chat share."""

    model: Annotated[str | None, Meta(description="Name of the served model; the default is that model.")] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, Meta(description="Choices per prompt, 1 by default.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Count | None, Meta(description="Most tokens to generate.")] = None
    min_tokens: Annotated[Count | None, Meta(description="No end before this many tokens.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="0 is greedy; 1 by default.")
    ] = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=_INT32)] | None, Meta(description="0 and -1 switch it off.")] = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=10)] | None = None  # scores are divided by it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        Annotated[LogitBias, Meta(max_length=1024)] | None, Meta(description="Token id, as a string, to a bias.")
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None, Meta(description="Same seed, same draws.")
    ] = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[
        Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])] | None,
        Meta(description=f"0 is served first; {DEFAULT_PRIORITY} by default."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="Cached prefixes are shared with requests of the same salt only."),
    ] = None
    speculation: Annotated[
        Literal["auto", "off"] | None,
        Meta(description="Whether tokens may be drafted, where the server drafts. How they are chosen stays the same."),
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Add `token_ids` to every choice.")] = None
    user: Annotated[
        Annotated[str, Meta(max_length=1024)] | None, Meta(description="Accepted for compatibility; not used.")
    ] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    echo: Annotated[bool | None, Meta(description="Put the prompt before the text.")] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None, Meta(description="Alternatives per token.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Let the tokenizer add its tokens; true by default.")
    ] = None

    @property
    def prompts(self) -> Sequence[str | array[int]]:
        """The prompts as a list, each a text or token ids."""
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Body, frozen=True, kw_only=True, gc=False):  # holds no cycle, and may be one of 100,000
    type: Literal["text"]
    text: str


class CalledFunction(Body, frozen=True, kw_only=True, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: Annotated[str | None, Meta(description="JSON, as text.")] = None


class ToolCall(Body, frozen=True, kw_only=True, gc=False):
    """A call in an assistant's message of the past. ``index`` numbers it in a stream, and is not used."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def as_template_input(self, arguments: Callable[[str], Any]) -> dict[str, Any]:
        """Returns the call for a chat template; ``arguments`` makes them from their text."""
        function = {"name": self.function.name, "arguments": arguments(self.function.arguments or "")}
        call = {"type": self.type, "function": function}
        return call if self.id is None else {"id": self.id, **call}


class ChatMessage(Body, frozen=True, kw_only=True, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None,
        Meta(description="Calls of the past, in messages of the role `assistant`; the chat template renders them."),
    ] = None
    tool_call_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        Meta(description="The call that a message of the role `tool` answers."),
    ] = None
    reasoning_content: Annotated[
        str | None, Meta(description="What the assistant thought, in messages of the past, for templates that show it.")
    ] = None
    reasoning: Annotated[str | None, Meta(description="The same, by vLLM's newer name.")] = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("Only the role `assistant` has `tool_calls`")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("Only the role `tool` has a `tool_call_id`")
        if self.thoughts and self.role != "assistant":
            raise ValueError("Only the role `assistant` has `reasoning_content`")

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str | None:
        content = self.content
        if content is None:
            return None if self.tool_calls else ""  # templates ask whether a message with calls says something, too
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def as_template_input(self, arguments: Callable[[str], Any] = str) -> dict[str, Any]:
        """Returns the message for a chat template: its content as text, and ``system`` for the role ``developer``.
        ``arguments`` makes a call's arguments from their text."""
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name is not None:
            said["name"] = self.name
        if self.tool_calls:
            said["tool_calls"] = [call.as_template_input(arguments) for call in self.tool_calls]
        if self.tool_call_id:
            said["tool_call_id"] = self.tool_call_id
        if self.thoughts:
            said |= {"reasoning_content": self.thoughts, "thinking": self.thoughts}  # Qwen's and gpt-oss's names
        return said


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
TemplateOptions = dict[str, str | int | float | bool | None]


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[Count | None, Meta(description="The newer name of `max_tokens`.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Open the assistant's turn; true by default.")] = (
        None
    )
    chat_template_kwargs: Annotated[TemplateOptions, Meta(max_length=32)] | None = None
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None,
        Meta(description="For chat templates that have it, as gpt-oss's does; others refuse it."),
    ] = None
    parse_special_tokens: Annotated[
        bool | None,
        Meta(description="What messages spell becomes a control token; false by default: it stays text."),
    ] = None


class TokenizeBody(Body, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="True by default for text, never for messages.")] = None
    add_generation_prompt: bool | None = None
    parse_special_tokens: Annotated[
        bool | None, Meta(description="In messages, as in chat; a prompt is always parsed.")
    ] = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
