"""Grafana for this machine, where it is installed: provisioned with Prometheus and the dashboards."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import yaml

from services.observe.program import Program

_HOMES = ("/usr/share/grafana", "/usr/local/share/grafana", "/opt/homebrew/share/grafana", "/opt/grafana")


def find() -> list[str] | None:
    """Return the words that start Grafana's server; None where it is not on PATH."""
    if found := shutil.which("grafana"):
        return [found, "server"]
    found = shutil.which("grafana-server")
    return None if found is None else [found]


def provision(folder: Path, prometheus_url: str, dashboards: Path) -> None:
    """Write what Grafana reads at its start: one data source, and the folder of dashboards."""
    source = {"name": "Prometheus", "type": "prometheus", "url": prometheus_url, "access": "proxy", "isDefault": True}
    provider = {"name": "expertmesh", "type": "file", "options": {"path": str(dashboards)}}
    _write(folder / "datasources", {"apiVersion": 1, "datasources": [source | {"jsonData": {"timeInterval": "2s"}}]})
    _write(folder / "dashboards", {"apiVersion": 1, "providers": [provider]})
    for empty in ("alerting", "plugins"):
        (folder / empty).mkdir()


def _write(folder: Path, content: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "expertmesh.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def program(words: list[str], folder: Path, port: int) -> Program:
    """Return Grafana as it runs with what ``folder`` has, on loopback alone and without a login to look at things."""
    environment = {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_SECURITY_ADMIN_PASSWORD": secrets.token_urlsafe(),  # not the one that everybody on this machine knows
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    home = next((home for home in _HOMES if (Path(home) / "conf/defaults.ini").is_file()), None)
    command = [*words, "--homepath", home] if home else words
    return Program("Grafana", command, folder / "grafana.log", f"http://127.0.0.1:{port}/api/health", environment)
