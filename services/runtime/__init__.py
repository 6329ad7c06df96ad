"""What every process needs to live: logs, signals, its parent's death, start-up errors, tasks, metrics over HTTP."""

from services.runtime.address import advertised, node_name, scrape_url
from services.runtime.daemon import in_daemon, left_behind
from services.runtime.incarnation import incarnation
from services.runtime.lifecycle import AGAIN, CRASHED, FORCED, RoleMain, run_process, run_role
from services.runtime.logs import bind_request_id, configure_logging
from services.runtime.metrics_server import MetricsServer
from services.runtime.parent import die_with_parent, watch_parent
from services.runtime.terminal import printable

__all__ = [
    "AGAIN",
    "CRASHED",
    "FORCED",
    "MetricsServer",
    "RoleMain",
    "advertised",
    "bind_request_id",
    "configure_logging",
    "die_with_parent",
    "in_daemon",
    "incarnation",
    "left_behind",
    "node_name",
    "printable",
    "run_process",
    "run_role",
    "scrape_url",
    "watch_parent",
]
