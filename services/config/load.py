"""Reads the command line, the environment and the YAML file into one :class:`Settings`, with each value's origin."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from services.config import redis_url as redis_urls
from services.config.fields import Role, option
from services.config.options import POSITIONAL_MODEL, OptionParser, add_options, bare, concerned
from services.config.renamed import RENAMED
from services.config.rules import TITLES, require
from services.config.settings import ENV_PREFIX, Settings, is_common, mask_url
from services.config.speculation import SPECULATIVE
from services.config.vllm import pointer
from services.errors import ConfigError

_CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets for services named expertmesh-*."""
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
_URL = ("redis_url", "redis_url_file")
"""Two settings for one thing: that of the later source counts."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "pattern": "matching"}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layered:
    """Effective settings, and the origin of each value that is not a default."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Returns the origin of the value of ``name``: an option, a variable, a file or ``default``."""
        return self.origins.get(name, "default")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Values of one source. ``label`` and ``key`` are its name and its keys in messages."""

    label: str
    prefix: str
    values: Mapping[str, object]

    def key(self, name: str) -> str:
        """Returns the setting ``name`` as users write it in this source."""
        if self.prefix == ENV_PREFIX:
            return ENV_PREFIX + name.upper()
        return option(name) if self.prefix == "--" else name

    def origin(self, name: str) -> str:
        return self.key(name) if self.prefix else self.label


def nearest_hint(word: str, known: Iterable[str]) -> str | None:
    """Returns ``Did you mean ...?`` if something in ``known`` resembles ``word``."""
    best = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {best[0]}?" if best else None


def load_settings(
    argv: Sequence[str] | None = None, *, role: Role | None = None, overrides: Mapping[str, object] | None = None
) -> Settings:
    """Returns the settings of one process. See :func:`load_layered`."""
    return load_layered(argv, role=role, overrides=overrides).settings


def load_layered(
    argv: Sequence[str] | None = None, *, role: Role | None = None, overrides: Mapping[str, object] | None = None
) -> Layered:
    """Returns the settings and their origins, from ``argv`` (``sys.argv`` for None) > environment > file > defaults.

    ``role`` restricts the options to those that concern it, and requires what it cannot run without; ``overrides`` beat
    everything.

    Raises:
        ConfigError: a key is unknown, or a value malformed or missing; it names the source, the key and what to write.
    """
    parser = OptionParser(f"expertmesh {role or 'serve'}", f"Run the {TITLES[role]}.")
    names = concerned(role)
    common = [name for name in names if is_common(name)]
    words = sys.argv[1:] if argv is None else argv
    layered = layer(parse_options(parser, words, names, positional="model" in names, common=common), overrides)
    if role:
        require(layered.settings, role)
    return layered


def parse_options(
    parser: OptionParser,
    argv: Sequence[str],
    names: Sequence[str],
    *,
    positional: bool = False,
    common: Collection[str] | None = None,
) -> dict[str, Any]:
    """Returns values in ``argv`` of the settings in ``names``, of ``config``, and of the arguments that ``parser`` had.
    With ``positional`` the model may be given without its option. The short help shows those in ``common``, or all for
    None.

    Raises:
        ConfigError: an option is unknown, does not belong here, or lacks its value.
    """
    add_options(parser, names, names if common is None else common, positional=positional)
    namespace, rest = parser.parse_known_args(argv)
    if rest:
        _refuse_unknown(parser, rest[0])
    return _with_model(vars(namespace))


def _with_model(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``given`` with the model that was given without an option under its setting's name."""
    model = given.pop(POSITIONAL_MODEL, None)
    if model is None:
        return given
    if "model" in given:
        raise ConfigError(
            f"The model is given twice: {model!r} and --model {given['model']}.", hint="Leave one of them out."
        )
    return given | {"model": model}


def layer(given: Mapping[str, Any], overrides: Mapping[str, object] | None = None) -> Layered:
    """Puts the options of the command line in ``given`` over the environment over the file over the defaults."""
    options = {name: value for name, value in given.items() if name in Settings.model_fields}
    config = given.get("config") or os.environ.get(_CONFIG_VARIABLE)
    sources = [_from_file(Path(str(config)).expanduser())] if config else []
    sources += [_from_environment(), _Source(label="command line", prefix="--", values=options)]
    if overrides:
        sources.append(_Source(label="override", prefix="", values=overrides))
    return _merge(sources)


def settings_of(values: Mapping[str, Any], label: str) -> Settings:
    """Returns the settings in ``values`` over the defaults, without the environment. ``label`` says in errors whose
    they are.

    Raises:
        ConfigError: one is unknown or malformed, or a file that one names cannot be read.
    """
    return _merge([_Source(label=label, prefix="", values=dict(values))]).settings


def _refuse_unknown(parser: OptionParser, argument: str) -> NoReturn:
    word = argument.split("=")[0]
    see = f"See `{parser.prog} --help`."
    if not word.startswith("-"):
        raise ConfigError(f"Unexpected argument {argument!r}.", hint=see)
    name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
    if name in Settings.model_fields:
        raise ConfigError(f"{word} does not apply to `{parser.prog}`.", hint=see)
    _refuse_renamed(word, name)
    if (instead := pointer(word)) is not None:
        raise ConfigError(f"{word} is not an option here: {instead}")
    raise ConfigError(f"Unknown option {word}.", hint=nearest_hint(word, parser.option_names()) or see)


def _refuse_renamed(written: str, name: str) -> None:
    """Raises ConfigError where an earlier release had the setting ``name``, which the user wrote as ``written``."""
    if name in RENAMED:
        raise ConfigError(f"{written} is no longer a setting.", hint=RENAMED[name])


def _from_environment() -> _Source:
    mine = {
        key.upper(): value
        for key, value in os.environ.items()
        if key.upper().startswith(ENV_PREFIX) and not _is_service_link(key.upper(), value)
    }
    known = [ENV_PREFIX + name.upper() for name in Settings.model_fields]
    for key in sorted(mine):
        if key != _CONFIG_VARIABLE and key not in known:
            _refuse_renamed(key, key.removeprefix(ENV_PREFIX).lower())
            raise ConfigError(f"Unknown environment variable {key}.", hint=nearest_hint(key, known) or "Unset it.")
    values = EnvSettingsSource(Settings)()
    return _Source(
        label="environment",
        prefix=ENV_PREFIX,
        values={name: value for name, value in values.items() if ENV_PREFIX + name.upper() in mine},
    )


def _is_service_link(key: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(key) or (key.endswith("_PORT") and _LINK_URL.match(value)))


def _from_file(path: Path) -> _Source:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"Cannot read the configuration file {path}: {reason}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of options to values, such as `port: 8000`.")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in values:
        if key not in Settings.model_fields:
            _refuse_renamed(f"{key!r} in {path}", key)
            hint = nearest_hint(key, Settings.model_fields) or "See `expertmesh config` for all keys."
            raise ConfigError(f"Unknown key {key!r} in {path}.", hint=hint)
    return _Source(label=str(path), prefix="", values=values)


def _merge(sources: Sequence[_Source]) -> Layered:
    """Puts later sources over earlier ones. Each is validated on its own, so that a hidden mistake is found, too."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for source in sources:
        try:
            Settings(**source.values)  # type: ignore[arg-type]
        except ValidationError as error:
            raise _config_error(error, source) from error
        if any(source.values.get(name) is not None for name in _URL):
            _check_one_url(source)
            values |= dict.fromkeys(_URL)
        values |= source.values
        origins |= {name: source.origin(name) for name in source.values}
    settings = Settings(**values)  # type: ignore[arg-type]
    if settings.redis_url_file is None:
        return Layered(settings=settings, origins=origins)
    url = _url_in(settings.redis_url_file)
    origins["redis_url"] = str(settings.redis_url_file)
    return Layered(settings=settings.model_copy(update={"redis_url": url}), origins=origins)


def _check_one_url(source: _Source) -> None:
    if all(source.values.get(name) is not None for name in _URL):
        both = " and ".join(source.key(name) for name in _URL)
        raise ConfigError(f"{source.label}: {both} both give the address of Redis.", hint="Leave one of them out.")


def _url_in(file: Path) -> str:
    try:
        return redis_urls.read(file)
    except ValueError as error:
        raise ConfigError(f"{file} {error}.", hint="It is one line: redis://USER:PASSWORD@HOST:PORT/0.") from error
    except OSError as error:
        raise ConfigError(f"Cannot read the Redis URL in {file}: {error.strerror}.") from error


def _config_error(error: ValidationError, source: _Source) -> ConfigError:
    name = str(error.errors()[0]["loc"][0])
    if name not in Settings.model_fields:
        _refuse_renamed(repr(name), name)
        return ConfigError(f"Unknown key {name!r}.", hint=nearest_hint(name, Settings.model_fields))
    value = source.values[name]
    shown = "***" if name == "api_key" else mask_url(value) if isinstance(value, str) else value
    return ConfigError(f"{source.label}: {source.key(name)} is {shown!r}; expected {expected(name)}.")


def expected(name: str) -> str:
    """Returns the values that the setting ``name`` takes: type, bounds or choices."""
    field = Settings.model_fields[name]
    kind = bare(field.annotation)
    if name == "redis_url":
        return "redis://, rediss://, redis+sentinel:// or unix:// and an address"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if name == "api_key":
        return "8 or more printable ASCII characters without spaces"
    if name == "speculative_config":
        return SPECULATIVE
    if name == "allowed_origins":
        return "origins such as https://chat.example.org, or *"
    if get_origin(kind) is list:
        return "role=url pairs such as scheduler=http://127.0.0.1:9100/metrics"
    rules = _BOUNDS.items()
    details = [f"{text} {getattr(rule, at)}" for rule in field.metadata for at, text in rules if hasattr(rule, at)]
    return f"{_KINDS[kind]} {' and '.join(details)}".strip()
