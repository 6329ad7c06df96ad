"""Writes what follows from the chart's values, the server's settings and its roles: schema, README.md, users of Redis;
and the dashboards and alerts of helm/observability.

`make chart` runs it; `--check` changes nothing and ends with 1 where something is out of date, as CI asks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from observability import dashboards, rules
from observability.alerts import ALERTS
from values_table import Value, documented, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.config import RENAMED, ROLES, Role, Settings, is_hidden, roles_of  # noqa: E402  beside an installed expertmesh this one counts
from services.queue.acl import RULES, permissions, user_line  # noqa: E402
from services.queue.keys import Keys  # noqa: E402

CHART = ROOT / "helm/expertmesh"
MARKS = ("<!-- values: begin, written by helm/generate.py -->", "<!-- /values -->")
OWNED = {
    *("revision", "api_key"),
    *("model", "served_model_name", "host", "advertise", "port", "metrics_port", "redis_url", "redis_url_file"),
    *("namespace", "layout", "workers", "expert_workers", "expert_groups", "expert_group", "fabric_port"),
    *("fabric_secret_file", "fabric_lane", "fabric_shared", "auth", "api_keys_file", "drain_delay", "drain_timeout"),
    *("log_format", "kubernetes_selector", "autoscale", "sleep_after", "scale_down_after"),
    *("target_ttft", "target_tpot", "shard_replicas", "min_replicas", "max_replicas"),
    *("min_attention", "max_attention", "min_gateways", "max_gateways"),
    *("otlp_endpoint", "trace_sample", "trace_folder"),
    *filter(is_hidden, Settings.model_fields),
}
"""Settings that the chart sets from other values, or that mean nothing in a cluster."""
HANDED_ON = {"drainSeconds": "drain_timeout", "drainDelaySeconds": "drain_delay", "groups": "expert_groups"} | {
    "minReplicas": "min_replicas",
    "maxReplicas": "max_replicas",
}
"""Values that are handed on as a setting of the server, and share its bounds."""
RENAMED_VALUES = {
    "attention.experts": "Use layout: disaggregated (was tcp), local, lockstep (was mesh) or colocated (was seats).",
    "attention.mesh.ranks": "Use attention.workers.",
    "attention.mesh.annotations": "Use attention.lockstep.annotations.",
    "attention.seats.workers": "Use attention.workers.",
    "attention.seats.groups": "Use attention.colocated.groups.",
    "attention.seats.shared": "Use attention.colocated.shared.",
}
"""Values of earlier charts: what to use now."""
_STRICT = {"additionalProperties": False}
_NAMES = ("existingSecret", "existingClaim", "caSecret", "tlsSecret")
_CLASSES = ("storageClassName", "priorityClassName", "runtimeClassName", "className")
NAMED = dict.fromkeys((*_NAMES, *_CLASSES), "objectName") | {
    "key": "secretKey",
    "caKey": "secretKey",
    "plainKey": "secretKeyOrNone",
    "repository": "repository",
    "tag": "tag",
    "size": "size",
    "shmSize": "size",
}
"""Key -> the definition that holds for it everywhere."""


def schema(values: list[Value], text: str) -> dict[str, Any]:
    """The schema of the values: no key that is not documented, no value of another type."""
    known = {value.path: value.schema for value in values}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart expertmesh",
        "definitions": definitions(),
        **_node((), yaml.safe_load(text), known, {"global": {"type": "object"}}),
    }


def _node(
    path: tuple[str, ...], default: Any, known: Mapping[tuple[str, ...], dict[str, Any] | None], more: dict[str, Any]
) -> dict[str, Any]:
    if path in known:
        return known[path] or _named(path[-1]) or {"type": _kind(default)} | _bounds(path[-1])
    properties = {key: _node((*path, key), value, known, {}) for key, value in default.items()}
    more = more | {name: _PASSED for name in _renamed_below(path) if name not in properties}
    return {"type": "object", **_STRICT, "properties": properties | more}


_PASSED = {"description": "Has another name now: the chart says which."}
"""Schema of what the schema leaves to the chart's checks, which know what to say."""


def _renamed_below(path: tuple[str, ...]) -> list[str]:
    """Keys of earlier charts at ``path``."""
    values = [name.split(".") for name in RENAMED_VALUES]
    return sorted({value[len(path)] for value in values if tuple(value[: len(path)]) == path})


def renamed_settings() -> dict[str, str]:
    """Settings of earlier servers that users of the chart could set, and for which there is something to say."""

    def owned(sentence: str) -> bool:
        return any(word.replace("-", "_") in OWNED for word in re.findall(r"--([a-z-]+)", sentence))

    said = RENAMED | {"kv_blocks": "Use --kv-memory-gib X."}  # an option of the server still, which no help names
    return {name: sentence for name, sentence in sorted(said.items()) if not owned(sentence)}


def _named(key: str) -> dict[str, Any]:
    return _ref(NAMED[key]) if key in NAMED else {}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{name}"}


def _kind(default: Any) -> str:
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return kinds[type(default)]


def _bounds(name: str) -> dict[str, Any]:
    """Those of the setting that the value becomes. Counts and seconds are not negative."""
    if name in HANDED_ON:
        described = Settings.model_json_schema()["properties"][HANDED_ON[name]]
        rules = [described, *described.get("anyOf", ())]
        return {key: value for rule in rules for key, value in rule.items() if key in ("minimum", "maximum")}
    return {"minimum": 0} if name in ("replicas", "uid") or name.endswith("Seconds") else {}


def _key_prefix() -> dict[str, Any]:
    """As the server's namespace, or empty."""
    pattern = Settings.model_json_schema()["properties"]["namespace"]["pattern"]
    return {"type": "string", "pattern": f"^({pattern.removeprefix('^').removesuffix('$')})?$"}


def definitions() -> dict[str, Any]:
    """Those of definitions.yaml, and those that follow from the server's settings."""
    overrides: dict[str, Any] = {
        "replicas": {"type": ["integer", "null"], "minimum": 0},
        "minReplicas": {"type": "integer"} | _bounds("minReplicas"),
        "maxReplicas": {"type": "integer"} | _bounds("maxReplicas"),
        "resources": _ref("resources"),
        "resourceClaims": _ref("claims"),
        "nodeSelector": _ref("labels"),
        "tolerations": _ref("tolerations"),
        "affinity": _ref("affinity"),
        "podLabels": _ref("labels"),
        "podAnnotations": _ref("strings"),
        "podSecurityContext": _ref("object"),
        "containerSecurityContext": _ref("object"),
        "extraEnv": _ref("env"),
        "extraVolumes": _ref("volumes"),
        "extraVolumeMounts": _ref("mounts"),
    }
    shared: dict[str, Any] = yaml.safe_load((ROOT / "helm/definitions.yaml").read_text(encoding="utf-8"))
    return shared | {
        "groups": {
            "type": "object",
            "patternProperties": {"^[0-9]+$": {"type": "object", **_STRICT, "properties": overrides}},
            **_STRICT,
        },
        "keyPrefix": _key_prefix(),
        "settings": settings(),
        **{f"{role}Settings": settings_of(role) for role in ROLES},
    }


def settings() -> dict[str, Any]:
    """Every setting of the server that a user of the chart may set, with type, bounds and choices."""
    described = Settings.model_json_schema()["properties"]
    properties = {}
    for name in sorted(set(described) - OWNED):
        rule = {key: value for key, value in described[name].items() if key not in ("default", "roles", "title")}
        roles = ", ".join(role for role in ROLES if role in roles_of(name))
        properties[name] = rule | {"description": f"{rule['description']} ({roles})"}
    properties |= dict.fromkeys(renamed_settings(), _PASSED)
    return {"type": "object", **_STRICT, "properties": properties}


def settings_of(role: Role) -> dict[str, Any]:
    """Those that ``role`` reads."""
    mine = [name for name in sorted(Settings.model_fields) if role in roles_of(name) and name not in OWNED]
    return {
        "type": "object",
        **_STRICT,
        "properties": {
            name: {"$ref": f"#/definitions/settings/properties/{name}"} for name in (*mine, *renamed_settings())
        },
    }


def renamed() -> str:
    """What the chart's checks say of names of earlier charts and servers."""
    text = yaml.safe_dump({"settings": renamed_settings(), "values": RENAMED_VALUES}, width=1000)
    return f"# Written by helm/generate.py: what to use instead of a name of an earlier release.\n{text}"


def users() -> str:
    """Those of the chart's Redis, as `expertmesh redis-acl` prints them; the chart puts its own prefix in."""
    return "".join(user_line(role, permissions(role, Keys("KEYPREFIX"))) + "\n" for role in RULES)


def results() -> dict[Path, str]:
    """File -> what it should hold."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = list(documented(text))
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    head, _, rest = readme.partition(MARKS[0])
    tail = rest.partition(MARKS[1])[2]
    return {
        CHART / "files/redis-users.acl": users(),
        CHART / "files/renamed.yaml": renamed(),
        CHART / "values.schema.json": json.dumps(schema(values, text), indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": f"{head}{MARKS[0]}\n{table(values)}\n{MARKS[1]}{tail}",
        CHART / "templates/prometheusrule.yaml": rules.template(ALERTS),
        CHART / "rules/expertmesh.rules.yaml": rules.plain(ALERTS, yaml.safe_load(text)["metrics"]["prometheusRule"]),
        **{CHART / "dashboards" / name: board for name, board in dashboards.texts().items()},
    }


def main() -> int:
    stale = {file: text for file, text in results().items() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        print(f"{file.relative_to(ROOT)} {'is out of date: run `make chart`' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
