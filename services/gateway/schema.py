"""What clients may send. Bodies are parsed here from bytes, so that every refusal is ours and names the field.

A null means the default. A field that is not declared is refused by name, unless its value is null or changes
nothing (:data:`NO_OPS`): a parameter that would be ignored is never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from services.errors import InvalidRequest, UnsupportedParameter
from services.queue.keys import DEFAULT_PRIORITY, PRIORITIES

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_LOGPROBS = 20
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
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Parameters of OpenAI's API and its relatives that are not implemented, with the values that change nothing."""

TokenId = Annotated[int, Field(ge=0, le=_INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = _Text | Annotated[list[_Text], Field(min_length=1)] | _Ids | Annotated[list[_Ids], Field(min_length=1)]
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]


class Body(BaseModel):
    """Base of all request bodies: strict types, finite numbers, undeclared fields kept for :func:`parse` to judge."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="allow",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = Field(None, description="Name of the served model; the default is that model.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices per prompt, 1 by default.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=_INT32, description="Most tokens to generate.")
    min_tokens: int | None = Field(None, ge=0, le=_INT32, description="No end before this many tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 by default.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32, description="0 and -1 switch it off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, max_length=1024, description="Token id, as a string, to a bias.")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="Same seed, same draws.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128)
    ignore_eos: bool | None = None
    priority: int | None = Field(
        None, ge=PRIORITIES[0], le=PRIORITIES[-1], description=f"0 is served first; {DEFAULT_PRIORITY} by default."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Cached prefixes are shared with requests of the same salt only.",
    )
    return_token_ids: bool | None = Field(None, description="Add `token_ids` to every choice.")
    user: str | None = Field(None, max_length=1024, description="Accepted for compatibility; not used.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = Field(None, description="Put the prompt before the text.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its tokens; true by default.")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each a text or token ids, however the client wrote them."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)

    def as_template_input(self) -> dict[str, str]:
        """The message as chat templates know it: text content, ``system`` for its newer name ``developer``."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=0, le=_INT32, description="The newer name of `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; true by default.")
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=32)
    parse_special_tokens: bool | None = Field(
        None, description="What messages spell becomes a control token; false by default: it stays text."
    )


class TokenizeBody(Body):
    """Body of ``POST /tokenize``: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = Field(None, description="True by default for text, never for messages.")
    add_generation_prompt: bool | None = None
    parse_special_tokens: bool | None = Field(None, description="In messages, as in chat; a prompt is always parsed.")
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


B = TypeVar("B", bound=Body)

_EMPTY = ("string_too_short", "too_short")
_OUT_OF_RANGE = ("greater_than_equal", "less_than_equal")
_PROMPT_HINT = "Send a string, a list of strings, a list of token ids or a list of such lists."
_LONGEST_NAME = 200  # characters of a field's name in an error
_BRANCHES = ("str", "int", "float", "bool")  # as a union's branches appear in the path of an error, beside list[...]


def parse(body_type: type[B], raw: bytes) -> B:
    """The typed body in ``raw``.

    Raises:
        InvalidRequest: not JSON, or a field of the wrong type or range; ``param`` names it.
        UnsupportedParameter: a field that this server does not implement.
    """
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)) from None
    _refuse_extras(body, "")
    return body


def _refusal(errors: list[ErrorDetails]) -> InvalidRequest:
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first['ctx']['error']}.", hint="Send UTF-8 JSON.")
    if not first["loc"]:
        return InvalidRequest("The body is not a JSON object.", hint='Send an object such as {"prompt": "Hello"}.')
    if first["loc"][0] == "prompt" and first["type"] != "missing":
        return InvalidRequest(_prompt_fault({error["type"] for error in errors}), hint=_PROMPT_HINT, param="prompt")
    # A union reports an error per branch: the branch that got furthest is the one that the client meant.
    furthest = max((error for error in errors if error["loc"][0] == first["loc"][0]), key=_progress)
    path = _path(furthest)
    rivals = [error for error in errors if _progress(error) == _progress(furthest) and _path(error) == path]
    messages = dict.fromkeys(error["msg"] for error in rivals)
    return InvalidRequest(f"{path}: {'; or: '.join(messages)}.", param=path)


def _progress(error: ErrorDetails) -> tuple[int, bool]:
    """How far validation got before ``error``: deeper is further, and a value's fault is further than its type's."""
    return len(error["loc"]), not error["type"].endswith("_type")


def _path(error: ErrorDetails) -> str:
    """The field as the client knows it: without the names of a union's branches."""
    parts = (str(part) for part in error["loc"] if isinstance(part, int) or _is_field(part))
    return ".".join(parts)[:_LONGEST_NAME]


def _is_field(part: str) -> bool:
    return part.isidentifier() and part not in _BRANCHES


def _prompt_fault(kinds: set[str]) -> str:
    if kinds.intersection(_EMPTY):
        return "prompt is empty."
    if kinds.intersection(_OUT_OF_RANGE):
        return "prompt has a token id out of range."
    return "prompt has the wrong type."


def _refuse_extras(value: Any, path: str) -> None:
    """Walks declared bodies inside ``value``; raises for the first undeclared field that would change the answer."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, Body | list):
                return  # lists are of one type: token ids and strings need no walk
            _refuse_extras(item, f"{path}{index}.")
    elif isinstance(value, Body):
        for name, extra in (value.model_extra or {}).items():
            if extra is not None and extra not in NO_OPS.get(name, ()):
                field = f"{path}{name}"[:_LONGEST_NAME]
                raise UnsupportedParameter(f"{field} is not supported.", hint="Leave it out.", param=field)
        for name in type(value).model_fields:
            inner = getattr(value, name)
            if isinstance(inner, Body | list):
                _refuse_extras(inner, f"{path}{name}.")
