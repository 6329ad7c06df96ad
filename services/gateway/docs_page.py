"""The API as one HTML page, made of the OpenAPI document. It has no script and loads nothing: a server that is cut off
from the internet shows it, too, and no other site learns who reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jinja2

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }} {{ version }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884 }
code { font-family: ui-monospace, monospace }
h2 { margin-top: 2.5rem }
</style>
</head>
<body>
<h1>{{ title }} {{ version }}</h1>
<p>{{ description }} The exact schemas are in <a href="openapi.json">openapi.json</a>.</p>
{% for operation in operations %}
<h2 id="{{ operation.id }}"><code>{{ operation.method }} {{ operation.path }}</code></h2>
<p>{{ operation.text }}{% if operation.key %} It needs an API key where keys are required.{% endif %}</p>
{% if operation.fields %}
<table>
<tr><th>field</th><th>type</th><th></th></tr>
{% for field in operation.fields %}
<tr><td><code>{{ field.name }}</code>{{ " (required)" if field.required }}</td>
<td>{{ field.type }}</td><td>{{ field.text }}</td></tr>
{% endfor %}
</table>
{% endif %}
<table>
<tr><th>status</th><th></th></tr>
{% for status, meaning in operation.answers %}
<tr><td>{{ status }}</td><td>{{ meaning }}</td></tr>
{% endfor %}
</table>
{% endfor %}
</body>
</html>
"""


def page(document: Mapping[str, Any]) -> bytes:
    """Returns the page for ``document``."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_PAGE)
    return template.render(**document["info"], operations=list(_operations(document))).encode()


def _operations(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield {
                "id": operation["operationId"],
                "method": method.upper(),
                "path": path,
                "text": operation.get("description", operation["summary"]),
                "key": "401" in operation["responses"],
                "fields": list(_fields(document, operation)),
                "answers": [(status, answer["description"]) for status, answer in operation["responses"].items()],
            }


def _fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "requestBody" not in operation:
        return
    body = _resolved(document, operation["requestBody"]["content"]["application/json"]["schema"])
    for name, schema in body["properties"].items():
        required = name in body.get("required", ())
        yield {"name": name, "required": required, "type": _type(schema), "text": schema.get("description", "")}


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """Returns the type in a few words: ``integer``, ``string or array of string``."""
    if "anyOf" in schema:
        kinds = [_type(kind) for kind in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", "any"))
    return f"array of {_type(schema['items'])}" if "items" in schema else kind
