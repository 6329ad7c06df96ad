"""Life of every process: logs, signals, its parent's death, start-up errors, tasks, metrics over HTTP."""

from services.runtime.address import advertised, incarnation, node_name, scrape_url
from services.runtime.build_series import release, show_build
from services.runtime.daemon import in_daemon, left_behind
from services.runtime.lifecycle import AGAIN, CRASHED, FORCED, run_process, run_role
from services.runtime.logs import bind_request_id, bind_tenant, configure_logging, printable
from services.runtime.metrics_server import MetricsServer
from services.runtime.parent import die_with_parent, watch_parent

__all__ = [
    "AGAIN",
    "CRASHED",
    "FORCED",
    "MetricsServer",
    "advertised",
    "bind_request_id",
    "bind_tenant",
    "configure_logging",
    "die_with_parent",
    "in_daemon",
    "incarnation",
    "left_behind",
    "node_name",
    "printable",
    "release",
    "run_process",
    "run_role",
    "scrape_url",
    "show_build",
    "watch_parent",
]
