"""Options of one series or column: the panel's defaults with the overrides that match it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.dashboards import colors, units
from services.dashboards.frames import Frame
from services.dashboards.model import FieldConfig, Matcher, Threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """``options`` are Grafana's, by the names that properties of overrides have: ``unit``, ``custom.lineWidth`` ..."""

    name: str
    options: Mapping[str, Any]

    @property
    def shown_name(self) -> str:
        return str(self.options.get("displayName") or self.name)

    @property
    def unit(self) -> str:
        return str(self.options.get("unit") or "")

    def number(self, name: str) -> float | None:
        """Return the option if it is a number."""
        value = self.options.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, value: float | None) -> str:
        """Return ``value`` with its unit, or what a mapping says instead."""
        mapped = self._mapped(value)
        if mapped.get("text") is not None:
            return str(mapped["text"])
        if value is None or math.isnan(value):
            return str(self.options.get("noValue") or "–")
        return units.text(value, self.unit, self.decimals)

    @property
    def decimals(self) -> int | None:
        found = self.number("decimals")
        return None if found is None else int(found)

    def color(self, value: float | None, *, default: str = "var(--text)", most: float | None = None) -> str:
        """Return the colour of ``value`` for a style: a mapping's, a fixed one, or that of the thresholds."""
        mapped = self._mapped(value).get("color")
        if mapped:
            return colors.css(str(mapped))
        fixed = self.fixed_color()
        if fixed:
            return fixed
        mode = str((self.options.get("color") or {}).get("mode", "thresholds"))
        if mode.startswith("continuous-") and value is not None and not math.isnan(value):
            return colors.between(mode.removeprefix("continuous-"), self._portion(value, most))
        steps = self.thresholds()
        if mode != "thresholds" or not steps or value is None:
            return default
        return colors.css(reached(steps, self._share(value, most)).color)

    def fixed_color(self) -> str | None:
        """Return the colour that is set whatever the value."""
        color = self.options.get("color") or {}
        return colors.css(str(color.get("fixedColor", ""))) if color.get("mode") == "fixed" else None

    def thresholds(self) -> list[Threshold]:
        """Return the steps, lowest first."""
        steps = (self.options.get("thresholds") or {}).get("steps") or []
        found = [Threshold(color=str(step.get("color", "green")), value=step.get("value")) for step in steps]
        return sorted(found, key=lambda step: -math.inf if step.value is None else step.value)

    def absolute(self, step: Threshold, most: float | None) -> float | None:
        """Return where ``step`` begins on the axis of the values."""
        if step.value is None or not self._by_percent:
            return step.value
        low, high = self.number("min") or 0.0, self.number("max") or most
        return None if high is None else low + step.value / 100 * (high - low)

    @property
    def _by_percent(self) -> bool:
        return (self.options.get("thresholds") or {}).get("mode") == "percentage"

    def _portion(self, value: float, most: float | None) -> float:
        """Return where ``value`` lies between the field's bounds, 0 to 1."""
        low, high = self.number("min") or 0.0, self.number("max") or most
        return min(1.0, max(0.0, (value - low) / (high - low))) if high and high > low else 0.0

    def _share(self, value: float, most: float | None) -> float:
        low, high = self.number("min") or 0.0, self.number("max") or most
        if not self._by_percent or high is None or high == low:
            return value
        return 100 * (value - low) / (high - low)

    def _mapped(self, value: float | None) -> Mapping[str, Any]:
        for mapping in self.options.get("mappings") or []:
            found = _mapping(str(mapping.get("type")), mapping.get("options") or {}, value)
            if found is not None:
                return found
        return {}


def _mapping(kind: str, options: Mapping[str, Any], value: float | None) -> Mapping[str, Any] | None:
    empty = value is None or math.isnan(value)
    if kind == "special":
        hit = empty and options.get("match") in ("null", "nan", "null+nan", "empty")
        return options.get("result") if hit else None
    if value is None or empty:
        return None
    if kind == "value":
        return options.get(f"{value:g}")
    if kind == "range":
        low, high = options.get("from"), options.get("to")
        inside = (low is None or value >= low) and (high is None or value <= high)
        return options.get("result") if inside else None
    return None


def reached(steps: Sequence[Threshold], value: float) -> Threshold:
    """Return the last step that ``value`` reaches; the first where it reaches none."""
    return next((step for step in reversed(steps) if step.value is None or value >= step.value), steps[0])


def field(config: FieldConfig, name: str, *, ref: str = "", values: Sequence[float] = ()) -> Field:
    """Return the options of the series or column ``name`` of the target ``ref``."""
    options = dict(_flat(config.defaults))
    for override in config.overrides:
        if _matches(override.matcher, name, ref, bool(values)):
            options |= {each.id: each.value for each in override.properties}
    return Field(name=name, options=options)


def of_frame(config: FieldConfig, frame: Frame) -> Field:
    """Return the options of a series."""
    return field(config, frame.name, ref=frame.ref, values=frame.values)


def _flat(defaults: Mapping[str, Any]) -> dict[str, Any]:
    custom = defaults.get("custom") or {}
    rest = {key: value for key, value in defaults.items() if key != "custom"}
    return rest | {f"custom.{key}": value for key, value in custom.items()}


def _matches(matcher: Matcher, name: str, ref: str, numeric: bool) -> bool:
    wanted = matcher.options
    if matcher.id == "byName":
        return bool(wanted == name)
    if matcher.id == "byRegexp":
        return re.search(str(wanted).strip("/"), name) is not None
    if matcher.id == "byFrameRefID":
        return bool(wanted == ref)
    return matcher.id == "byType" and wanted == "number" and numeric
