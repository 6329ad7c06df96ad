"""Variables of a dashboard: their values, and the texts in which they stand, as Grafana puts them into PromQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.config import nearest_hint
from services.dashboards.model import Variable
from services.dashboards.times import Range, duration, rate_interval
from services.errors import ConfigError

ALL = "$__all"
_NAME = re.compile(r"\$(\w+)|\[\[(\w+?)(?::(\w+))?\]\]|\$\{(\w+)(?:\.[^:}]+)?(?::([^}]+))?\}")
_SPECIAL = re.compile(r"([\\^$*+?.()|{}\[\]])")
_LABEL_VALUES = re.compile(r"^\s*label_values\(\s*(?:(.+),)?\s*([A-Za-z_][A-Za-z0-9_]*)\s*\)\s*$", re.S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """What a variable stands for. ``several``: it may have more than one value, so it goes into regular expressions.
    ``everything`` is the text for all values where the dashboard has one; it is put as it is."""

    values: Sequence[str]
    several: bool = False
    everything: str | None = None

    def shown(self) -> str:
        """Return what the page's head shows."""
        return "all" if self.everything is not None else ", ".join(self.values)


class LabelValues(Protocol):
    """Where values of labels are found."""

    async def label_values(self, label: str, match: str | None, span: Range) -> list[str]: ...


def builtins(span: Range, step_s: float, scrape_s: float) -> dict[str, Value]:
    """Return Grafana's own variables for a query with that step."""
    rate_s = rate_interval(step_s, scrape_s)
    texts = {
        "__interval": duration(step_s),
        "__interval_ms": f"{step_s * 1000:.0f}",
        "__rate_interval": duration(rate_s),
        "__rate_interval_ms": f"{rate_s * 1000:.0f}",
        "__range": duration(round(span.seconds)),
        "__range_s": f"{span.seconds:.0f}",
        "__range_ms": f"{span.seconds * 1000:.0f}",
        "__from": f"{span.start_s * 1000:.0f}",
        "__to": f"{span.end_s * 1000:.0f}",
    }
    return {name: Value(values=[text]) for name, text in texts.items()}


def expand(text: str, values: Mapping[str, Value]) -> str:
    """Return ``text`` with ``$name``, ``${name:format}`` and ``[[name]]`` replaced; other names stay."""

    def put(match: re.Match[str]) -> str:
        plain, bracketed, bracket_form, braced, brace_form = match.groups()
        value = values.get(plain or bracketed or braced)
        return match[0] if value is None else _formatted(value, bracket_form or brace_form)

    return _NAME.sub(put, text)


def _formatted(value: Value, form: str | None) -> str:
    if value.everything is not None:
        return value.everything
    if form in ("raw", "text", "csv"):
        return ",".join(value.values)
    if form == "pipe":
        return "|".join(value.values)
    if form == "doublequote":
        return ",".join(f'"{each}"' for each in value.values)
    if form == "regex":
        return _either([_SPECIAL.sub(r"\\\1", each) for each in value.values])
    if not value.several:
        return ",".join(map(_in_string, value.values))
    return _either([_in_string(_SPECIAL.sub(r"\\\1", each)) for each in value.values])


def _in_string(text: str) -> str:
    """Return ``text`` as it is written between double quotes of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _either(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"({'|'.join(values)})"


async def resolve(
    variables: Sequence[Variable], given: Mapping[str, Sequence[str]], source: LabelValues, span: Range
) -> dict[str, Value]:
    """Return the values of ``variables``: those ``given``, else what the dashboard was saved with, else the first.

    Raises:
        ConfigError: a query of a variable is of a kind that is not known here.
        PrometheusUnavailable, QueryFailed: Prometheus does not find their values.
    """
    found: dict[str, Value] = {}
    for variable in variables:
        chosen = given.get(variable.name) or _saved(variable)
        options: Sequence[str] = ()
        if not chosen or (ALL in chosen and variable.all_value is None):
            options = await _options(variable, found, source, span)
        found[variable.name] = _value(variable, chosen, options)
    return found


def check_names(given: Mapping[str, Sequence[str]], known: Sequence[str]) -> None:
    """Refuse names of variables that no dashboard has.

    Raises:
        ConfigError: a name in ``given`` is not among ``known``.
    """
    for name in given:
        if name not in known:
            listed = f"The dashboards have: {', '.join(known) or 'none'}."
            raise ConfigError(f"Unknown variable {name!r}.", hint=nearest_hint(name, known) or listed)


def _saved(variable: Variable) -> Sequence[str]:
    value = (variable.current or {}).get("value")
    if variable.type in ("textbox", "constant") and value in (None, ""):
        return [str(variable.query or "")]
    if variable.type == "datasource":
        return [str(value or "default")]
    values = value if isinstance(value, list) else [value]
    return [str(each) for each in values if each not in (None, "")]


def _value(variable: Variable, chosen: Sequence[str], options: Sequence[str]) -> Value:
    several = bool(variable.multi or variable.include_all)
    if not chosen:
        chosen = [ALL] if variable.include_all else list(options[:1])
    if ALL not in chosen:
        return Value(values=list(chosen) or [""], several=several)
    if variable.all_value is not None:
        return Value(values=[ALL], several=True, everything=variable.all_value)
    return Value(values=list(options) or [""], several=True)


async def _options(variable: Variable, found: Mapping[str, Value], source: LabelValues, span: Range) -> Sequence[str]:
    query = variable.query.get("query", "") if isinstance(variable.query, dict) else str(variable.query or "")
    if variable.type in ("custom", "interval"):
        return [each.rpartition(" : ")[2].strip() for each in query.split(",")]
    if variable.type != "query":
        raise ConfigError(f"Variables of the kind {variable.type!r} are not known here.")
    asked = _LABEL_VALUES.match(query)
    if asked is None:
        raise ConfigError(f"The variable {variable.name} asks for {query!r}; only label_values() is known here.")
    match = expand(asked[1], found) if asked[1] else None
    return _sorted(_matching(await source.label_values(asked[2], match, span), variable.regex or ""), variable.sort)


def _matching(values: Sequence[str], regex: str) -> list[str]:
    """Return the values that ``/regex/`` finds something in, or what its group has there."""
    if not regex:
        return list(values)
    pattern = re.compile(regex.strip("/"))
    matches = [match for match in map(pattern.search, values) if match]
    return list(dict.fromkeys(match[1] if pattern.groups else match.string for match in matches))


def _sorted(values: Sequence[str], order: int | None) -> list[str]:
    """Grafana's orders: 0 is none; then ascending and descending by letters, by number, by letters of any case."""
    kinds = (str, _first_number, str.lower)
    if not order:
        return list(values)
    return sorted(values, key=kinds[(order - 1) // 2], reverse=order % 2 == 0)


def _first_number(text: str) -> float:
    match = re.search(r"\d+", text)
    return float(match[0]) if match else -1.0
