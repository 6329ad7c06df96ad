"""Generates the command line from the settings. Values stay text here; ``load`` validates them with all others."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from services.config.fields import ATTENTION, COLOCATED, EXPERTS, WORKERS, Role, option
from services.config.sections import LockstepSettings
from services.config.settings import TOPICS, Settings, is_hidden, roles_of
from services.config.vllm import ALIASES
from services.errors import ConfigError

_MORE = (
    "--help=all shows all options, and --help=WORD those of a topic or with that word in their names, such as "
    "--help=autoscaling or --help=kv. Each can also be set in the environment (--max-num-seqs as "
    "EXPERTMESH_MAX_NUM_SEQS) or in the file given by --config (max_num_seqs)."
)
_Chosen = Callable[[argparse.Action, str], bool]
"""Whether a help text has an argument, from the argument and the heading that it is under."""


class OptionParser(argparse.ArgumentParser):
    """argparse that raises :class:`ConfigError` instead of exiting, and knows no abbreviations."""

    def __init__(self, prog: str, description: str, **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False, **kwargs)
        self._details: Collection[str] = ()
        self._help = self.add_argument("-h", "--help", nargs=0, action=_Help, help="show this help")

    def shorten_help(self, details: Collection[str], usage: str) -> None:
        """Makes ``--help`` leave out the arguments in ``details``. As with vLLM, ``--help=all`` has all of them, and
        ``--help=WORD`` those of a topic or with that word in their names."""
        self._details = details
        self._help.nargs, self._help.metavar = "?", "WORD"
        self.usage = usage
        self.epilog = f"{self.epilog or ''} {_MORE}".strip()

    def format_help(self) -> str:
        return self._text(lambda action, _: action.dest not in self._details)

    def help_about(self, word: str) -> str:
        """Returns the help text for the topics and options that ``word`` occurs in; for all of them if it is ``all``.

        Raises:
            ConfigError: there are none.
        """
        wanted = word.lower().lstrip("-").replace("_", "-")

        def chosen(action: argparse.Action, heading: str) -> bool:
            return wanted == "all" or wanted in heading.lower() or any(wanted in name for name in action.option_strings)

        if not any(chosen(action, heading) for heading, action in self._shown()):
            raise ConfigError(f"No option of `{self.prog}` has {word!r} in its name.", hint="See --help=all.")
        return self._text(chosen)

    def _shown(self) -> list[tuple[str, argparse.Action]]:
        return [
            (group.title or "", action)
            for group in self._action_groups
            for action in group._group_actions
            if action.help is not argparse.SUPPRESS
        ]

    def _text(self, chosen: _Chosen) -> str:
        text = self._get_formatter()
        text.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        text.add_text(self.description)
        for group in self._action_groups:
            text.start_section(group.title)
            text.add_arguments(action for action in group._group_actions if chosen(action, group.title or ""))
            text.end_section()
        text.add_text(self.epilog)
        return text.format_help()

    def option_names(self) -> list[str]:
        """Returns the names of all options, with their dashes."""
        return [name for action in self._actions for name in action.option_strings]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Takes ``--max_model_len`` for ``--max-model-len``, as vLLM does."""
        words = list(sys.argv[1:] if args is None else args)
        options = words.index("--") if "--" in words else len(words)
        return super().parse_known_args([*map(_dashed, words[:options]), *words[options:]], namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint=f"See `{self.prog} --help`.")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


class _Help(argparse.Action):
    """Prints help and exits. Its value, if it has one, says about what."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, values: Any, _option: Any = None) -> NoReturn:
        assert isinstance(parser, OptionParser)
        print(parser.help_about(values) if values else parser.format_help(), end="")
        parser.exit()


def bare(annotation: Any) -> Any:
    """Returns ``annotation`` without ``| None``."""
    if get_origin(annotation) is types.UnionType:
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation


def _metavar(name: str) -> str:
    kind = bare(Settings.model_fields[name].annotation)
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    fallback = "LIST" if get_origin(kind) is list else str(kind.__name__).upper()
    return {"INT": "N", "FLOAT": "X", "STR": "TEXT", "PATH": "PATH"}.get(fallback, fallback)


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    text = (field.description or "").replace("%", "%%")
    return text if field.default in (None, [], "") else f"{text} (default: {field.default})"


_FIXED: dict[Role, tuple[str, ...]] = {
    COLOCATED: ("layout", "workers", "overlap", "fabric_lane"),
    WORKERS: ("expert_group",),
}
"""Settings that these roles do not have, as they follow from the role."""
POSITIONAL_MODEL = "positional_model"
"""Where the parser puts the model that is given without an option, as in `expertmesh serve MODEL`."""
_COUNTS = ("expert_workers", "expert_groups")


def concerned(role: Role | None) -> list[str]:
    """Returns the names of the settings of ``role``; of all roles for None."""
    if role in (COLOCATED, WORKERS):
        both = {*concerned(ATTENTION), *concerned(EXPERTS)} - {*LockstepSettings.model_fields, *_FIXED[role]}
        known = both | {*(_COUNTS if role == WORKERS else ())}
        return [name for name in Settings.model_fields if name in known]
    return [name for name in Settings.model_fields if role is None or role in roles_of(name)]


def add_options(
    parser: OptionParser, names: Sequence[str], common: Collection[str], *, positional: bool = False
) -> None:
    """Adds ``--config`` and one option per setting in ``names``, under the heading of its topic. The short help shows
    those in ``common``. An option that is not given is absent from the namespace. With ``positional`` the model may be
    given without its option."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options (EXPERTMESH_CONFIG)")
    if positional:
        parser.add_argument(POSITIONAL_MODEL, nargs="?", metavar="MODEL", help="the same as --model MODEL")
    for topic, settings in TOPICS.items():
        mine = [name for name in settings if name in names]
        group = parser.add_argument_group(topic) if mine else parser
        for name in mine:
            help_text = argparse.SUPPRESS if is_hidden(name) else _help(name)
            _add(group, name, option(name), help_text)
            for alias in (alias for alias, meant in ALIASES.items() if meant == name):
                _add(group, name, option(alias), argparse.SUPPRESS)
    if details := [name for name in names if name not in common]:
        parser.shorten_help(details, f"{parser.prog} {'[MODEL] ' * positional}[OPTIONS]")


def _add(group: argparse._ActionsContainer, name: str, written: str, help_text: str) -> None:
    group.add_argument(written, dest=name, default=argparse.SUPPRESS, help=help_text, **_shape(name))


def _shape(name: str) -> dict[str, Any]:
    if Settings.model_fields[name].annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"metavar": _metavar(name)}
