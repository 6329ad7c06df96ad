"""Reads the command line, the environment and the YAML file into one :class:`Settings` that knows its origins."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from services.config import redis_url as redis_urls
from services.config.options import OptionParser, add_options, bare, concerned
from services.config.settings import (
    ATTENTION,
    COLOCATED,
    ENV_PREFIX,
    EXPERTS,
    GATEWAY,
    SCHEDULER,
    WORKERS,
    Role,
    Settings,
    mask_url,
    option,
)
from services.errors import ConfigError

_CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets for services named expertmesh-*."""
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
_URL = ("redis_url", "redis_url_file")
"""Two ways to say one thing: the later source's counts, whichever it is."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "pattern": "matching"}
_TITLES = {
    None: "server",
    GATEWAY: "gateway",
    SCHEDULER: "scheduler",
    ATTENTION: "attention worker",
    EXPERTS: "expert worker",
    COLOCATED: "attention worker with experts",
    WORKERS: "workers of one machine",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layered:
    """Effective settings, and for each value that is not a default the place it came from."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Where the value of ``name`` came from: an option, a variable, a file or ``default``."""
        return self.origins.get(name, "default")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Values of one source. ``label`` and ``key`` format name and origin for messages."""

    label: str
    prefix: str
    values: Mapping[str, object]

    def key(self, name: str) -> str:
        """``name`` as the user wrote it in this source."""
        if self.prefix == ENV_PREFIX:
            return ENV_PREFIX + name.upper()
        return option(name) if self.prefix == "--" else name

    def origin(self, name: str) -> str:
        return self.key(name) if self.prefix else self.label


def nearest_hint(word: str, known: Iterable[str]) -> str | None:
    """``Did you mean ...?`` if something in ``known`` resembles ``word``."""
    best = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {best[0]}?" if best else None


def load_settings(
    argv: Sequence[str] | None = None, *, role: Role | None = None, overrides: Mapping[str, object] | None = None
) -> Settings:
    """Settings of one process. See :func:`load_layered`."""
    return load_layered(argv, role=role, overrides=overrides).settings


def load_layered(
    argv: Sequence[str] | None = None, *, role: Role | None = None, overrides: Mapping[str, object] | None = None
) -> Layered:
    """Settings and their origins, from ``argv`` (``sys.argv`` for None) > environment > file > defaults.

    ``role`` restricts the options to those that concern it, and makes sure that what it cannot run without is
    there; ``overrides`` beat everything.

    Raises:
        ConfigError: a key is unknown, or a value malformed or missing; names the source, the key and what to write.
    """
    parser = OptionParser(f"expertmesh {role or 'serve'}", f"Run the {_TITLES[role]}.")
    layered = layer(parse_options(parser, sys.argv[1:] if argv is None else argv, concerned(role)), overrides)
    if role:
        require(layered.settings, role)
    return layered


def parse_options(parser: OptionParser, argv: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """What was given in ``argv``: the settings in ``names``, ``config``, and the arguments ``parser`` had before.

    Raises:
        ConfigError: an option is unknown, does not belong here, or lacks its value.
    """
    add_options(parser, names)
    namespace, rest = parser.parse_known_args(argv)
    if rest:
        _refuse_unknown(parser, rest[0])
    return vars(namespace)


def layer(given: Mapping[str, Any], overrides: Mapping[str, object] | None = None) -> Layered:
    """Puts the options of the command line in ``given`` over the environment over the file over the defaults."""
    options = {name: value for name, value in given.items() if name in Settings.model_fields}
    config = given.get("config") or os.environ.get(_CONFIG_VARIABLE)
    sources = [_from_file(Path(str(config)).expanduser())] if config else []
    sources += [_from_environment(), _Source(label="command line", prefix="--", values=options)]
    if overrides:
        sources.append(_Source(label="override", prefix="", values=overrides))
    return _merge(sources)


def _refuse_unknown(parser: OptionParser, argument: str) -> NoReturn:
    word = argument.split("=")[0]
    see = f"See `{parser.prog} --help`."
    if not word.startswith("-"):
        raise ConfigError(f"Unexpected argument {argument!r}.", hint=see)
    if word.removeprefix("--").replace("-", "_") in Settings.model_fields:
        raise ConfigError(f"{word} does not concern `{parser.prog}`.", hint=see)
    raise ConfigError(f"Unknown option {word}.", hint=nearest_hint(word, parser.option_names()) or see)


def colocated(settings: Settings) -> Settings:
    """What an attention worker and an expert worker in one process go by: rows to other processes, no lane to this one,
    and nothing to overlap with, since it is this GPU that computes experts.

    Raises:
        ConfigError: something else was asked for.
    """
    others = {
        "overlap": ("auto", "off"),
        "fabric_lane": ("auto", "tcp"),
        "expert_slots": (None,),
        "expert_slices": (1,),
    }
    for name, allowed in others.items():
        if (value := getattr(settings, name)) not in allowed:
            raise ConfigError(
                f"{option(name)} {value} cannot be where attention has a seat beside it.",
                hint="Leave it out, or choose --colocated-by mesh or expert workers.",
            )
    return settings.model_copy(update={"experts": "tcp", "fabric_lane": "tcp", "overlap": "off"})


def check_sharing(settings: Settings) -> None:
    """Raises ConfigError where experts would be both shared by attention workers and in workers of their own."""
    if settings.colocated_workers and (settings.expert_workers or settings.attention_workers > 1):
        raise ConfigError(
            "Experts are either shared by attention workers or in workers of their own.",
            hint="Give --colocated-workers alone, or --attention-workers and --expert-workers.",
        )


def require(settings: Settings, role: Role) -> None:
    """Refuses settings with which ``role`` cannot run on its own."""
    if role == WORKERS:
        _require_workers(settings)
        return
    if role == COLOCATED:
        require(colocated(settings), ATTENTION)
        require(colocated(settings), EXPERTS)
        return
    if role in (GATEWAY, ATTENTION, EXPERTS) and settings.model is None:
        raise ConfigError(f"The {_TITLES[role]} needs a checkpoint.", hint="Give its folder with --model DIR.")
    if settings.redis_url is None:
        raise ConfigError(
            f"The {_TITLES[role]} needs a Redis.",
            hint="Give --redis-url redis://HOST:PORT, or run all roles with `expertmesh serve`, which brings its own.",
        )
    if role == SCHEDULER:
        _require_bounds(settings)
        if settings.kubernetes == "on" and settings.kubernetes_selector is None:
            raise ConfigError(
                "--kubernetes on does not say which workloads are this deployment's.",
                hint="Give --kubernetes-selector app.kubernetes.io/instance=RELEASE.",
            )
    if role == ATTENTION and settings.overlap == "on" and settings.experts != "tcp":
        raise ConfigError(
            f"--overlap on has nothing to overlap with --experts {settings.experts}.",
            hint="Two micro-batches take turns with expert workers alone (--experts tcp); leave it out.",
        )
    if role == ATTENTION and settings.experts == "mesh":
        if settings.lookahead == "on":
            raise ConfigError(
                "--lookahead on cannot be with --experts mesh.",
                hint="Ranks in lock-step cut their steps alike and read each at once; leave it out.",
            )
        _require_mesh(settings)
    workers = settings.experts not in ("local", "mesh")
    if role == ATTENTION and workers and settings.experts_patience >= settings.step_timeout:
        raise ConfigError(
            f"--experts-patience {settings.experts_patience:g} is not below --step-timeout {settings.step_timeout:g}: "
            "a step that waits for experts would count as hung.",
            hint="Lower the one or raise the other.",
        )
    apart = role == EXPERTS or (role == ATTENTION and workers)
    shares = apart or (role == ATTENTION and settings.experts == "mesh")
    if shares and settings.fabric_secret_file is None:
        others = "attention and expert workers" if apart else "all ranks"
        raise ConfigError(
            f"The {_TITLES[role]} needs the secret that {others} share.",
            hint="Put the same 16 or more random bytes into a file on each host: --fabric-secret-file FILE.",
        )
    if role == ATTENTION and settings.fabric_tls_name is not None and settings.fabric_tls_ca is None:
        raise ConfigError(
            "--fabric-tls-name names whose certificate to expect, but connections are not encrypted.",
            hint="Give --fabric-tls-ca, too.",
        )
    encrypted = settings.fabric_tls_ca if role == ATTENTION else settings.fabric_tls_cert
    if apart and encrypted and settings.fabric_lane in ("nccl", "gloo"):
        raise ConfigError(
            f"What goes by --fabric-lane {settings.fabric_lane} cannot be encrypted.",
            hint="Choose auto or tcp, or leave TLS out.",
        )


def _require_workers(settings: Settings) -> None:
    check_sharing(settings)
    seats = settings.colocated_workers + settings.expert_workers
    if not (seats or settings.attention_workers):
        raise ConfigError(
            "There is no worker to start.",
            hint="Give --colocated-workers N, --attention-workers N or --expert-workers N.",
        )
    _require_ports(settings, seats)
    if ":" in settings.device:
        raise ConfigError(
            f"--device {settings.device} is one device for all workers.",
            hint="Choose cuda, of which each has its own from --gpu on, cpu or auto.",
        )
    if settings.experts == "mesh":
        raise ConfigError(
            "Workers of several machines in lock-step are started one by one.",
            hint="Give --colocated-workers N, or run `expertmesh attention --rank` for each.",
        )
    if settings.colocated_workers:
        require(settings, COLOCATED)
        return
    apart = settings.model_copy(update={"experts": "tcp"}) if settings.expert_workers else settings
    if settings.attention_workers:
        require(apart, ATTENTION)
    if settings.expert_workers:
        require(apart, EXPERTS)


def _require_ports(settings: Settings, seats: int) -> None:
    """The common page has --metrics-port, each worker the next one, and each seat one from --fabric-port on."""
    workers = settings.colocated_workers or settings.attention_workers + settings.expert_workers
    taken = {
        "--metrics-port": range(settings.metrics_port, settings.metrics_port and settings.metrics_port + workers + 1),
        "--fabric-port": range(settings.fabric_port, settings.fabric_port and settings.fabric_port + seats),
    }
    for name, ports in taken.items():
        if ports and ports[-1] > 65_535:
            raise ConfigError(
                f"{name} {ports[0]} leaves no room for the ports of all workers.",
                hint=f"{len(ports)} in a row are needed.",
            )
    pages, fabric = taken.values()
    if pages and fabric and pages[0] <= fabric[-1] and fabric[0] <= pages[-1]:
        raise ConfigError(
            f"Pages on ports {pages[0]} to {pages[-1]} and seats on ports {fabric[0]} to {fabric[-1]} meet.",
            hint="Move --metrics-port or --fabric-port.",
        )


def check_bounds(given: object, names: Iterable[str]) -> None:
    """Raises ConfigError where ``fewest_NAME`` of ``given`` is more than its ``most_NAME``."""
    for name in names:
        fewest, most = getattr(given, f"fewest_{name}"), getattr(given, f"most_{name}")
        if fewest > most:
            raise ConfigError(
                f"--fewest-{name} {fewest} is more than --most-{name} {most}.", hint="Lower the one or raise the other."
            )


def _require_bounds(settings: Settings) -> None:
    check_bounds(settings, ("replicas", "attention", "gateways"))
    for shard, (fewest, most) in settings.shard_bounds().items():
        if fewest > most:
            raise ConfigError(
                f"--shard-replicas {shard}={fewest}:{most}: the fewest are more than the most.",
                hint="Lower the one or raise the other.",
            )


def _require_mesh(settings: Settings) -> None:
    address, _, port = (settings.mesh_address or "").rpartition(":")
    if not address or not port.isdigit():
        raise ConfigError("Ranks meet at the address of rank 0.", hint="Give all of them --mesh-address HOST:PORT.")
    if settings.rank >= settings.ranks:
        raise ConfigError(
            f"There is no --rank {settings.rank} of --ranks {settings.ranks}.", hint="Ranks count from 0."
        )
    if settings.ranks % settings.expert_slices:
        raise ConfigError(
            f"--ranks {settings.ranks} cannot hold experts in --expert-slices {settings.expert_slices}.",
            hint="The slices have to divide the ranks.",
        )
    if settings.mesh_timeout >= settings.step_timeout:
        raise ConfigError(
            f"--mesh-timeout {settings.mesh_timeout:g} is not below --step-timeout {settings.step_timeout:g}: "
            "a rank that waits for another would count as hung.",
            hint="Lower the one or raise the other.",
        )


def _from_environment() -> _Source:
    mine = {
        key.upper(): value
        for key, value in os.environ.items()
        if key.upper().startswith(ENV_PREFIX) and not _is_service_link(key.upper(), value)
    }
    known = [ENV_PREFIX + name.upper() for name in Settings.model_fields]
    for key in sorted(mine):
        if key != _CONFIG_VARIABLE and key not in known:
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
            hint = nearest_hint(key, Settings.model_fields) or "See `expertmesh config` for all keys."
            raise ConfigError(f"Unknown key {key!r} in {path}.", hint=hint)
    return _Source(label=str(path), prefix="", values=values)


def _merge(sources: Sequence[_Source]) -> Layered:
    """Later sources beat earlier ones. Each is validated on its own, so that a hidden mistake is found too."""
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
        raise ConfigError(f"{source.label}: {both} say twice where Redis is.", hint="Leave one of them out.")


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
        return ConfigError(f"Unknown key {name!r}.", hint=nearest_hint(name, Settings.model_fields))
    value = source.values[name]
    shown = mask_url(value) if isinstance(value, str) else value
    return ConfigError(f"{source.label}: {source.key(name)} is {shown!r}; expected {expected(name)}.")


def expected(name: str) -> str:
    """What may be written for the setting ``name``: type, bounds or choices."""
    field = Settings.model_fields[name]
    kind = bare(field.annotation)
    if name == "redis_url":
        return "redis://, rediss://, redis+sentinel:// or unix:// and an address"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is list:
        return "role=url pairs such as scheduler=http://127.0.0.1:9100/metrics"
    rules = _BOUNDS.items()
    details = [f"{text} {getattr(rule, at)}" for rule in field.metadata for at, text in rules if hasattr(rule, at)]
    return f"{_KINDS[kind]} {' and '.join(details)}".strip()
