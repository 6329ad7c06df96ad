"""The checkpoint's own chat template: messages in, prompt text out, in a Jinja sandbox.

The template is the checkpoint's (trusted to render, not to reach Python); the messages are the client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.nodes import Filter, For, Node
from jinja2.nodes import Template as Parsed
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.errors import CheckpointError, InvalidRequest
from services.gateway.tokenizer import SpecialTokens

_FILES = ("chat_template.jinja", "chat_template.jinja2")
_MAX_STEPS = 200_000
"""Turns of loops, and calls, of one rendering: a second at most. A conversation has at most 4,096 messages."""
_MAX_CHARS = 16 << 20
"""Characters of a rendered prompt; one that fits into a context has less."""
_STEPS = "steps of this rendering"  # a name that no template can spell
_COUNTED = "counted"
RESERVED = frozenset(
    {
        *("messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"),
        *SpecialTokens.__struct_fields__,
    }
)
"""Names that a template gets from the server or the checkpoint: options may not stand in for them."""


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedByTemplate(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _TooMuch(jinja2.TemplateError):
    """The template would take too long."""


class _Steps:
    """What one rendering may still take."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch(f"it takes more than {_MAX_STEPS} steps")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take()
            yield item


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    steps: _Steps = context[_STEPS]
    return steps.each(items)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also counts turns of loops, and calls: nested ones could go on for ever."""

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> Parsed:
        parsed = super().parse(source, name, filename)
        for loop in parsed.find_all(For):
            loop.iter = Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return parsed

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as the sandbox
        __context[_STEPS].take()
        return super().call(__context, __obj, *args, **kwargs)


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(message)


def _tojson(value: object, indent: int | None = None, **_options: object) -> str:
    """Returns JSON without HTML escapes, unlike Jinja's own filter: templates print it into a prompt."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else msgspec.json.format(encoded, indent=0)).decode()


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_COUNTED] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return environment


class ChatTemplate:
    """A compiled template. ``source`` is its text, which ``/tokenizer_info`` shows."""

    def __init__(self, source: str, special: SpecialTokens) -> None:
        """Raises :class:`CheckpointError` where ``source`` is not a template."""
        self.source = source
        self._tokens = {name: value for name, value in msgspec.structs.asdict(special).items() if value is not None}
        try:
            environment = _environment()
            self._template = environment.from_string(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"The chat template does not parse: {error.message} (line {error.lineno}).",
                hint="Repair chat_template.jinja or tokenizer_config.json of the checkpoint.",
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        """Renders the prompt for ``messages``; ``options`` are the template's own switches (``enable_thinking``, ...),
        none of them in :data:`RESERVED`.

        Raises:
            InvalidRequest: the template refuses these messages, fails on them, or takes too long.
        """
        variables = {"tools": None, "documents": None, **self._tokens, **options, _STEPS: _Steps()}
        pieces = self._template.generate(
            {**variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        )
        try:
            return "".join(_short(pieces))
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error.message}.", param="messages"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {error}.",
                hint="Send plain system, user and assistant messages, user and assistant in turn.",
                param="messages",
            ) from error


def _short(pieces: Iterable[str]) -> Iterator[str]:
    """Yields ``pieces``. Raises where they are more characters than any prompt has."""
    chars = 0
    for piece in pieces:
        chars += len(piece)
        if chars > _MAX_CHARS:
            raise _TooMuch(f"it writes more than {_MAX_CHARS} characters")
        yield piece


def _configured(value: object) -> str | None:
    """Returns ``chat_template`` of the configuration: a string, or a list of named ones with one called ``default``."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        default = named.get("default")
        return default if isinstance(default, str) else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", hint="Download the checkpoint again.") from error


def load_chat_template(model_dir: Path, config: Mapping[str, object], special: SpecialTokens) -> ChatTemplate | None:
    """Returns the template file of the checkpoint, else the template in its tokenizer configuration, else None.

    Raises:
        CheckpointError: the template cannot be read, or does not parse.
    """
    for name in _FILES:
        if (model_dir / name).is_file():
            return ChatTemplate(_read(model_dir / name), special)
    source = _configured(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special)
