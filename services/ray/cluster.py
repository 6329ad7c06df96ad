"""What the commands do to a Ray cluster: deploy and wait, ask, delete."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.table import Table

from services.config import Settings, mask_url
from services.errors import ConfigError
from services.gateway.auth import keys_required
from services.model.load_spec import load_spec
from services.ray import arguments as given
from services.ray.application import app
from services.ray.connection import AWAY, api_url, connected, proxies, stop_signals
from services.ray.units import units
from services.runtime.local_servers import LocalServer, OnRay, announce
from services.runtime.run_folder import RunFolder
from services.supervisor.handover import check_port

_POLL_S = 0.5
_NOTE_S = 10.0
_ANSWER_S = 5.0
_WIDE = 1000
"""Columns of a table whose cells are never cut: a terminal wraps its lines, and a pipe has none."""
_STATES = {"ready": "green", "failed": "red", "died": "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an application is to be: the cluster at ``address``, and Serve's proxies on ``host`` and ``port``.

    ``update`` allows it to change an application that has its name.
    """

    address: str | None
    name: str
    host: str
    port: int
    route_prefix: str = "/"
    update: bool = False


def up(arguments: Mapping[str, Any], place: Place) -> int:
    """Deploy the application and wait until it is ready. A cluster that had to be started ends with this process.

    Raises:
        ConfigError: an argument is wrong, or the application could not be deployed.
        PortInUse: the cluster has to be started, and something else listens on the proxies' port.
        RayUnavailable: the cluster cannot be reached.
    """
    described = given.read(arguments)
    settings = described.checked_settings()
    start = partial(_before_start, described, settings, place)
    with RunFolder() as folder, connected(place.address, start=start) as own, stop_signals() as stop:
        _check_name(place)
        url = proxies(place.host, place.port)
        if stop.is_set():
            return 0
        try:
            _deploy(arguments, place)
            ready = _wait(partial(_runs, place.name), place.name, stop)
            if ready:
                _introduce(folder if own else None, settings, place, url)
                ready = _wait(partial(_answers, url, place), place.name, stop)
            _say(ready, own, settings, place, url)
            if ready and own:
                stop.wait()
        finally:
            if own:
                print("stopping when open requests have ended; a second Ctrl-C stops at once", flush=True)
                _delete(place.name)
    return 0


def status(*, address: str | None, name: str) -> int:
    """Print a table of the application's processes. Return 0 if all are ready, 1 otherwise."""
    with connected(address):
        found, redis_url, gateways = _overview(name), _redis_url(name), _gateways(name)
    print(f"{found['app']}: {found['model']}, layout {found['layout']}, Redis {mask_url(redis_url) or 'not there yet'}")
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "node", "pid", "starts", "restarts by Ray", "waits for"):
        table.add_column(column, no_wrap=True)
    for row in found["units"]:
        color = _STATES.get(row["state"], "yellow")
        cells = (row["unit"], f"[{color}]{row['state']}[/]", row["node"], row["pid"] or "", row["starts"])
        table.add_row(*map(str, (*cells, row["restarts"], row["waits_for"])))
    console = Console(width=_WIDE, soft_wrap=True)
    with console.capture() as drawn:
        console.print(table)
    print(*(line.rstrip() for line in drawn.get().splitlines()), sep="\n")
    if found["targets"]:
        print("wanted by the scheduler:", ", ".join(f"{of} {count}" for of, count in found["targets"].items()))
    for lack in filter(None, (found["lacking"], gateways)):
        print(lack)
    states = {row["state"] for row in found["units"]}
    return 0 if states == {"ready"} and not found["lacking"] and not gateways else 1


def application(name: str) -> OnRay:
    """Return the application on the cluster of RAY_ADDRESS, or on the one that runs here, as a server to ask.

    Raises:
        RayUnavailable: no cluster can be reached.
        ConfigError: it has no such application, or that has no Redis yet.
    """
    with connected(None):
        found, redis_url, url, gateways = _overview(name), _redis_url(name), api_url(name), _gateways(name)
    if not redis_url:
        raise ConfigError(f"The application {name} has no Redis yet.", hint="See `expertmesh ray status`.")
    server = LocalServer(url=url, model_name=found["model"], namespace=found["namespace"], redis_url=redis_url)
    lacks = [found["lacking"]] if found["lacking"] else _not_ready(found)
    return OnRay(server=server, lacks=tuple(filter(None, (*lacks, gateways))))


def down(*, address: str | None, name: str) -> int:
    """Drain and end the application's processes. Serve and other applications stay."""
    with connected(address):
        _check_there(name)
        _delete(name)
    print(f"{name} has ended")
    return 0


def reserved_cpus(arguments: given.Arguments, settings: Settings) -> float:
    """Return the cores that the application reserves at its start."""
    found = units(settings, schedulers=arguments.schedulers)
    gateways = arguments.gateways.min_replicas * arguments.gateways.cpus
    return gateways + sum(arguments.resources_of(unit.role).cpus for unit in found)


def _before_start(arguments: given.Arguments, settings: Settings, place: Place) -> int:
    """Check what would fail later, and return the cores of a cluster for this application alone: all of its processes
    have room, as under `expertmesh serve`, however few cores there are."""
    check_port(place.host, place.port, option="--http-port")
    if settings.model is not None and settings.model.is_dir():
        load_spec(settings.model)
    return max(os.cpu_count() or 1, math.ceil(reserved_cpus(arguments, settings)))


def _check_name(place: Place) -> None:
    """Raise ConfigError where the application would replace another one unasked."""
    with suppress(RayServeException):  # Serve does not run yet
        if place.name in serve.status().applications and not place.update:
            raise ConfigError(
                f"An application {place.name!r} is on this cluster.",
                hint="Change it with --update, or choose another --name with another --route-prefix.",
            )


def _deploy(arguments: Mapping[str, Any], place: Place) -> None:
    target = serve.RunTarget(app(arguments), name=place.name, route_prefix=place.route_prefix)
    try:
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except (RuntimeError, ValueError, RayServeException) as error:
        raise ConfigError(f"The application {place.name} could not be deployed: {error}") from error


def _runs(name: str) -> bool:
    """Return whether Serve has started the application. Raises ConfigError where that failed."""
    application = serve.status().applications.get(name)
    if application is None or application.status == "DELETING":
        raise ConfigError(f"The application {name} was deleted meanwhile.")
    if application.status == "DEPLOY_FAILED":
        said = [deployment.message for deployment in application.deployments.values() if deployment.message]
        reason = " ".join(map(_brief, [*said, application.message]))
        raise ConfigError(f"The application {name} could not be deployed: {reason}")
    return bool(application.status == "RUNNING")


def _answers(url: str, place: Place) -> bool:
    """Return whether a request to ``url`` can be served, by this application and not by what else listens there."""
    routes = httpx.get(f"{url}/-/routes", timeout=_ANSWER_S)
    if routes.status_code != 200 or routes.json().get(place.route_prefix) != place.name:
        return False
    return httpx.get(f"{_below(url, place)}/ready", timeout=_ANSWER_S).status_code == 200


def _wait(done: Callable[[], bool], name: str, stop: threading.Event) -> bool:
    """Return True once ``done``, False if ``stop`` comes first. Says now and then what is missing."""
    noted = time.monotonic()
    while not stop.is_set():
        with suppress(httpx.HTTPError, ValueError, *AWAY):
            if done():
                return True
        if time.monotonic() - noted > _NOTE_S:
            noted = time.monotonic()
            print(f"waiting for: {_missing(name)}", flush=True)
        stop.wait(_POLL_S)
    return False


def _missing(name: str) -> str:
    try:
        found = _overview(name)
    except AWAY:
        return "the controller"
    return found["lacking"] or ", ".join(_not_ready(found)) or "the gateway, at the address of Serve's proxies"


def _not_ready(overview: Mapping[str, Any]) -> list[str]:
    found = [row for row in overview["units"] if row["state"] != "ready"]
    return [f"{row['unit']} ({row['waits_for'] or row['state']})" for row in found]


def _introduce(folder: RunFolder | None, settings: Settings, place: Place, url: str) -> None:
    """Say how clients get keys. ``folder`` lets other commands on this machine find the server; None: it goes on after
    this process, where no record of it would be true for long."""
    redis_url = _redis_url(place.name)
    if folder is not None and redis_url:
        announce(folder, settings, url=_below(url, place), redis_url=redis_url)
    if keys_required(settings.auth, "0.0.0.0") and settings.api_keys_file is None:
        private = settings.redis_url is None and folder is None
        where = f" --redis-url {redis_url}" if private else ""
        print(f"Clients need an API key: `expertmesh keys create NAME{where}` makes one.", flush=True)


def _say(ready: bool, own: bool, settings: Settings, place: Place, url: str) -> None:
    if ready:
        print(f"expertmesh serves {settings.model_name} at {_below(url, place)}/v1", flush=True)
    if ready and own:
        print("Ctrl-C stops the server, and the Ray cluster that was started for it.", flush=True)
    elif not own:
        goes_on = "" if ready else "The application goes on starting: "
        print(
            f"{goes_on}`expertmesh ray status --name {place.name}` shows its processes, "
            f"`expertmesh ray down --name {place.name}` ends it."
        )


def _below(url: str, place: Place) -> str:
    return url + place.route_prefix.rstrip("/")


def _delete(name: str) -> None:
    """Delete the application, and wait until all of it has ended: open requests may take their time."""
    while True:
        try:
            serve.delete(name)
        except TimeoutError:  # Ray's, after a minute
            print("open requests have not ended yet", flush=True)
        else:
            return


def _check_there(name: str) -> None:
    """Raise ConfigError where there is no such application."""
    try:
        known = serve.status().applications
    except RayServeException:
        known = {}
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"The Ray cluster has no application {name!r}.", hint=f"Applications there: {there}.")


def _overview(name: str) -> dict[str, Any]:
    """Return the controller's overview. Raises ConfigError where there is no such application."""
    _check_there(name)
    handle = serve.get_deployment_handle("Controller", name)
    found: dict[str, Any] = handle.overview.remote().result(timeout_s=_ANSWER_S)
    return found


def _gateways(name: str) -> str:
    """Return what the application's gateways lack, in Serve's words; empty where they lack nothing."""
    gateway = serve.status().applications[name].deployments.get("Gateway")
    if gateway is None or gateway.status == "HEALTHY":
        return ""
    states = ", ".join(f"{count} {state.lower()}" for state, count in gateway.replica_states.items()) or "none yet"
    return f"gateways: {states}. {_brief(gateway.message)}".rstrip()


def _brief(message: str) -> str:
    """Return a message of Serve's; of one with the tracebacks of all processes that an error passed, the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Traceback" not in message:
        return " ".join(lines)
    kind, _, said = lines[-1].partition(": ")
    return said if kind.startswith("services.") and said else lines[-1]


def _redis_url(name: str) -> str:
    """Return the URL of the application's Redis; empty where the controller has none, or does not answer."""
    with suppress(*AWAY):
        url: str = serve.get_deployment_handle("Controller", name).redis_url.remote().result(timeout_s=_ANSWER_S)
        return url
    return ""
