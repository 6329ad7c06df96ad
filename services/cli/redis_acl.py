"""`expertmesh redis-acl`: users for Redis, one for each role, as lines of the file that its `aclfile` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.config import OptionParser, layer, parse_options
from services.errors import ConfigError
from services.queue.acl import RULES, permissions, user_line
from services.queue.keys import Keys

_MIN_PASSWORD = 16


def main(argv: Sequence[str]) -> int:
    """Prints the users and returns the exit code.

    Raises:
        ConfigError: a role is unknown, a version malformed, or a password missing or short.
    """
    given = parse_options(_parser(), argv, ["namespace"])
    keys, version = Keys(layer(given).settings.namespace), _version(given["redis_version"])
    for role in _roles(given):
        password = _password(Path(given["passwords"]), role) if given["passwords"] else None
        print(user_line(given["user_prefix"] + role, permissions(role, keys, version), password))
    return 0


def _parser() -> OptionParser:
    parser = OptionParser("expertmesh redis-acl", "Print a Redis user for each role, limited to what the role does.")
    parser.add_argument("role", nargs="*", metavar="ROLE", help=f"one of {', '.join(RULES)} (default: all)")
    parser.add_argument(
        "--passwords",
        metavar="DIR",
        help="folder with a file per role holding its password (only hashes are printed); else nobody can log in",
    )
    parser.add_argument(
        "--user-prefix", default="", metavar="TEXT", help="prefix of the user names, if deployments share a Redis"
    )
    parser.add_argument(
        "--redis-version",
        default="7.0",
        metavar="X.Y",
        help="version of the server; before 7.0 no key can be read-only",
    )
    return parser


def _roles(given: dict[str, Any]) -> list[str]:
    asked: list[str] = given["role"] or list(RULES)
    if unknown := [role for role in asked if role not in RULES]:
        raise ConfigError(f"There is no role {unknown[0]!r}.", hint=f"Roles are {', '.join(RULES)}.")
    return asked


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and (minor or "0").split(".")[0].isdigit()):
        raise ConfigError(f"{text!r} is not a Redis version.", hint="Give it as --redis-version 7.4.")
    return int(major), int((minor or "0").split(".")[0])


def _password(folder: Path, role: str) -> str:
    try:
        password = (folder / role).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"Cannot read the password of {role}, {folder / role}: {reason}.") from error
    if len(password) < _MIN_PASSWORD:
        raise ConfigError(
            f"The password of {role} has fewer than {_MIN_PASSWORD} characters.",
            hint="Redis keeps a plain hash of it, so draw it at random: `openssl rand -hex 24`.",
        )
    return password
