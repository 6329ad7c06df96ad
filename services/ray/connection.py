"""How the commands reach a Ray cluster and Serve's proxies: those that run, or new ones."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from services.errors import ConfigError, RayUnavailable
from services.supervisor.handover import base_url

_REACH_S = 5.0
AWAY = (TimeoutError, ray.exceptions.RayError, RayServeException)
"""What a question to an application or to Serve raises while what it asks starts again."""


@contextmanager
def connected(address: str | None, *, start: Callable[[], int] | None = None) -> Iterator[bool]:
    """Connect to a cluster; yield whether it had to be started.

    Args:
        start: called before one is started, returns how many cores it is to have; None: none is started.

    Raises:
        RayUnavailable: there is none, or it cannot be used.
    """
    named = address or os.environ.get("RAY_ADDRESS")
    _check_reachable(named)
    own = False
    try:
        try:
            _init(address=address or "auto")
        except ConnectionError as error:
            if named or start is None:
                raise RayUnavailable(
                    f"No Ray cluster answers{f' at {named}' if named else ''}.",
                    hint="Start one with `ray start --head`, or give --address HOST:PORT.",
                ) from error
            own = True
            _init(address="local", include_dashboard=False, num_cpus=start())
    except (RuntimeError, ValueError, ConnectionError) as error:  # another version of Ray; an address that is none
        raise RayUnavailable(f"The Ray cluster cannot be used: {error}") from error
    try:
        yield own
    finally:
        if own:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def proxies(host: str, port: int) -> str:
    """Return the URL of Serve's proxies: of those that run, or else of new ones on every node.

    Raises:
        ConfigError: they cannot be started there, or Serve runs without any.
    """
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is None:
        _start_proxies(host, port)
        return base_url(host, port)
    found = running.http_config
    if found.host is None:
        raise ConfigError("Serve runs without proxies on this cluster.", hint="Start it with a `proxy_location`.")
    if (found.host, found.port) != (host, port):
        print(f"Serve runs already: its proxies are on {found.host}, port {found.port}.", flush=True)
    return base_url(found.host, found.port)


def api_url(name: str) -> str:
    """Return the URL of the application ``name``, which Serve runs behind its proxies."""
    running = _get_global_client()
    assert running is not None, "it raises where Serve does not run"
    found = running.get_serve_details()
    options, prefix = found["http_options"], found["applications"][name]["route_prefix"] or ""
    return f"{base_url(options['host'], options['port'])}{prefix.rstrip('/')}"


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
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


def _init(**options: Any) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would note its parts on the user's terminal
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _start_proxies(host: str, port: int) -> None:
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    except (RuntimeError, *AWAY) as error:
        with suppress(RuntimeError, *AWAY):
            serve.shutdown()  # type: ignore[no-untyped-call]  # it has just begun, and has no way in
        reason = str(error).strip().splitlines()[-1:]
        raise ConfigError(
            f"Serve's proxies could not be started on {host}, port {port}: {' '.join(reason)}",
            hint="Choose another port with --http-port N.",
        ) from error


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
