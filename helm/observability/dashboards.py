"""All dashboards as Grafana's JSON. In: :mod:`observability.boards`. Out: a file's name and text for each.

They share their variables, their links to one another, and the look of :mod:`observability.panels`.
"""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from observability.boards import autoscaler, cost, experts, latency, overview, queue, workers
from observability.boards.board import Board, Setting
from observability.panels import DATASOURCE

TAG = "expertmesh"
BOARDS: tuple[Board, ...] = (
    overview.BOARD,
    latency.BOARD,
    experts.BOARD,
    autoscaler.BOARD,
    queue.BOARD,
    workers.BOARD,
    cost.BOARD,
)
_ALL = models.VariableOption(selected=True, text="All", value="$__all")


def texts() -> dict[str, str]:
    """File's name -> its text, ready for Grafana's import, a provisioning folder, a ConfigMap or the operator."""
    return {f"{board.name}.json": text(board) for board in BOARDS}


def text(board: Board) -> str:
    return json.dumps(_plain(built(board)), indent=1, ensure_ascii=False) + "\n"


def built(board: Board) -> models.Dashboard:
    """``board`` as the SDK's type."""
    made = (
        dashboard.Dashboard(f"expertmesh / {board.title}")
        .uid(f"expertmesh-{board.name}")
        .description(board.shows)
        .tags([TAG])
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-3h", "now")
        .refresh("30s")
        .link(_others())
    )
    for variable in (*_variables(), *(_setting(setting) for setting in board.settings)):
        made = made.with_variable(variable)
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(panel)
    return _numbered(made.build())


def _numbered(board: models.Dashboard) -> models.Dashboard:
    """Panels need ids of their own, by which links and alerts name them."""
    for number, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number
    return board


def _variables() -> list[Any]:
    """What narrows every query: see :data:`observability.queries.SELECTOR`."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        source,
        _label("namespace", "Namespace", ""),
        _label("release", "Release", _RELEASE),
        _label("job", "Job", _JOB),
    ]


_RELEASE = 'namespace=~"$namespace"'
_JOB = f'{_RELEASE},app_kubernetes_io_instance=~"$release"'


def _label(name: str, title: str, within: str) -> dashboard.QueryVariable:
    label = "app_kubernetes_io_instance" if name == "release" else name
    query = f"label_values(expertmesh_build_info{{{within}}}, {label})"
    return (
        dashboard.QueryVariable(name)
        .label(title)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )


def _setting(setting: Setting) -> dashboard.TextBoxVariable:
    value = models.VariableOption(selected=True, text=setting.value, value=setting.value)
    made = dashboard.TextBoxVariable(setting.name).label(setting.title).description(setting.shows)
    return made.default_value(setting.value).current(value).options([value])


def _others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("expertmesh").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _plain(board: models.Dashboard) -> dict[str, Any]:
    """Read back once, so that what the schema's types add by default is written, too."""
    register_default_plugins()
    read = models.Dashboard.from_json(json.loads(json.dumps(board, cls=JSONEncoder)))
    found: dict[str, Any] = json.loads(json.dumps(read, cls=JSONEncoder))
    return found
