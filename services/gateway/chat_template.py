"""The checkpoint's own chat template: messages in, prompt text out, in a Jinja sandbox.

The template is the checkpoint's (trusted to render, not to reach Python); the messages are the client's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.errors import CheckpointError, InvalidRequest
from services.gateway.tokenizer import SpecialTokens

_FILES = ("chat_template.jinja", "chat_template.jinja2")


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedByTemplate(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(message)


def _tojson(value: object, indent: int | None = None, **_options: object) -> str:
    """Returns JSON without HTML escapes, unlike Jinja's own filter: templates print it into a prompt."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else msgspec.json.format(encoded, indent=0)).decode()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
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
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"The chat template does not parse: {error.message} (line {error.lineno}).",
                hint="Repair chat_template.jinja or tokenizer_config.json of the checkpoint.",
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        """Renders the prompt for ``messages``; ``options`` are the template's own switches (``enable_thinking``, ...).

        Raises:
            InvalidRequest: the template refuses these messages or fails on them.
        """
        variables = {"tools": None, "documents": None, **self._tokens, **options}
        try:
            return self._template.render(
                {**variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error.message}.", param="messages"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {error}.",
                hint="Send plain system, user and assistant messages in alternation.",
                param="messages",
            ) from error


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
