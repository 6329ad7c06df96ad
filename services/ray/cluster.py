"""What the commands do to a Ray cluster: connect, deploy and wait, ask, delete."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.table import Table

from services.errors import ConfigError, RayUnavailable
from services.model.load_spec import load_spec
from services.ray import arguments as given
from services.ray.application import app
from services.supervisor.handover import base_url

_POLL_S = 0.5
_NOTE_S = 10.0
_REACH_S = 5.0
_STATES = {"ready": "green", "failed": "red", "died": "red"}


def up(arguments: Mapping[str, Any], *, address: str | None, name: str, http: Mapping[str, Any]) -> int:
    """Deploy the application and wait until it is ready. A cluster that had to be started ends with this process.

    Raises:
        ConfigError: an argument is wrong, or the application could not be deployed.
        RayUnavailable: the cluster cannot be reached.
    """
    settings = given.read(arguments).checked_settings()
    with _stop_signals() as stop, _connected(address, start=True) as own:
        if own and settings.model is not None and settings.model.is_dir():
            load_spec(settings.model)  # before anything is started
        serve.start(http_options={"location": "EveryNode", **http})
        url = base_url(http["host"], http["port"])
        try:
            _deploy(arguments, name)
            if not _wait(url, name, stop):
                return 0
            print(f"expertmesh serves {settings.model_name} at {url}/v1", flush=True)
            if own:
                print("Ctrl-C stops the server, and the Ray cluster that was started for it.", flush=True)
                stop.wait()
            else:
                print(f"`expertmesh ray status` shows its processes, `expertmesh ray down --name {name}` ends it.")
        finally:
            if own:
                print("stopping when open requests have ended", flush=True)
                serve.delete(name)
    return 0


def status(*, address: str | None, name: str) -> int:
    """Print a table of the application's processes. Return 0 if all are ready, 1 otherwise."""
    with _connected(address):
        found = _overview(name)
    print(f"{found['app']}: {found['model']}, layout {found['layout']}")
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "node", "pid", "starts", "restarts by Ray", "waits for"):
        table.add_column(column)
    for row in found["units"]:
        color = _STATES.get(row["state"], "yellow")
        cells = (row["unit"], f"[{color}]{row['state']}[/]", row["node"], row["pid"] or "", row["starts"])
        table.add_row(*map(str, (*cells, row["restarts"], row["waits_for"])))
    Console(soft_wrap=True).print(table)
    if found["targets"]:
        print("wanted by the scheduler:", ", ".join(f"{of} {count}" for of, count in found["targets"].items()))
    if found["lacking"]:
        print(found["lacking"])
    states = {row["state"] for row in found["units"]}
    return 0 if states == {"ready"} and not found["lacking"] else 1


def down(*, address: str | None, name: str) -> int:
    """Drain and end the application's processes. Serve and other applications stay."""
    with _connected(address):
        _overview(name)
        serve.delete(name)
    print(f"{name} has ended")
    return 0


@contextmanager
def _connected(address: str | None, *, start: bool = False) -> Iterator[bool]:
    """Connect to a cluster; yield whether it had to be started."""
    own = False
    _check_reachable(address)
    try:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            if address is not None or not start:
                raise RayUnavailable(
                    f"No Ray cluster answers{f' at {address}' if address else ''}.",
                    hint="Start one with `ray start --head`, or give --address HOST:PORT.",
                ) from error
            own = True
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python; an address that is none
        raise RayUnavailable(f"The Ray cluster cannot be used: {error}") from error
    try:
        yield own
    finally:
        if own:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise RayUnavailable at once where nobody listens at ``address``: Ray itself tries for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise RayUnavailable(
            f"Nobody listens at {address}: {error}.", hint="`ray status` on the head shows the address of a cluster."
        ) from error


def _deploy(arguments: Mapping[str, Any], name: str) -> None:
    try:
        serve.run(app(arguments), name=name, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise ConfigError(f"The application {name} could not be deployed: {_reason(name) or error}") from error


def _reason(name: str) -> str:
    """Return what Serve says of the deployments of an application that failed."""
    application = serve.status().applications.get(name)
    if application is None:
        return ""
    said = [deployment.message for deployment in application.deployments.values() if deployment.message]
    return " ".join([application.message, *said]).strip()


def _wait(url: str, name: str, stop: threading.Event) -> bool:
    """Return True once a request can be served, False if ``stop`` comes first. Says now and then what is missing."""
    noted = time.monotonic()
    while not stop.wait(_POLL_S):
        try:
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        if time.monotonic() - noted > _NOTE_S:
            noted = time.monotonic()
            print(f"waiting for: {_missing(name)}", flush=True)
    return False


def _missing(name: str) -> str:
    found = _overview(name)
    waits = [f"{row['unit']} ({row['waits_for'] or row['state']})" for row in found["units"] if row["state"] != "ready"]
    return found["lacking"] or ", ".join(waits) or "the gateway"


def _overview(name: str) -> dict[str, Any]:
    """Return the controller's overview. Raises ConfigError where there is no such application."""
    known = serve.status().applications
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"The Ray cluster has no application {name!r}.", hint=f"Applications there: {there}.")
    handle = serve.get_deployment_handle("Controller", name)
    found: dict[str, Any] = handle.overview.remote().result(timeout_s=30)
    return found


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; the second one ends the process."""
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
