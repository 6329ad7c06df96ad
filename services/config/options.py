"""Generates the command line from the settings. Values stay text here; ``load`` validates them with all others."""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from services.config.fields import ATTENTION, COLOCATED, EXPERTS, WORKERS, Role, option
from services.config.settings import SECTIONS, Settings, is_hidden, roles_of
from services.config.vllm import ALIASES
from services.errors import ConfigError


class OptionParser(argparse.ArgumentParser):
    """argparse that raises :class:`ConfigError` instead of exiting, and knows no abbreviations."""

    def __init__(self, prog: str, description: str, **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)

    def option_names(self) -> list[str]:
        """Returns the names of all options, with their dashes."""
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint=f"See `{self.prog} --help`.")


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
    return text if field.default in (None, []) else f"{text} (default: {field.default})"


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
        both = {*concerned(ATTENTION), *concerned(EXPERTS)} - {*SECTIONS["lockstep"].model_fields, *_FIXED[role]}
        known = both | {*(_COUNTS if role == WORKERS else ())}
        return [name for name in Settings.model_fields if name in known]
    return [name for name in Settings.model_fields if role is None or role in roles_of(name)]


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], *, positional: bool = False) -> None:
    """Adds ``--config`` and one option per setting in ``names``, under the heading of its section. An option that is
    not given is absent from the namespace. With ``positional`` the model may be given without its option."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options (EXPERTMESH_CONFIG)")
    if positional:
        parser.add_argument(POSITIONAL_MODEL, nargs="?", metavar="MODEL", help="the same as --model MODEL")
    for heading, section in SECTIONS.items():
        mine = [name for name in section.model_fields if name in names]
        group = parser.add_argument_group(heading) if mine else parser
        for name in mine:
            help_text = argparse.SUPPRESS if is_hidden(name) else _help(name)
            names_of = [option(name), *(option(alias) for alias, meant in ALIASES.items() if meant == name)]
            group.add_argument(*names_of, dest=name, default=argparse.SUPPRESS, help=help_text, **_shape(name))


def _shape(name: str) -> dict[str, Any]:
    if Settings.model_fields[name].annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"metavar": _metavar(name)}
