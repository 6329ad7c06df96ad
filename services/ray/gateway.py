"""The gateway as replicas of a Serve deployment: its own ASGI application behind Serve's proxies.

What a gateway does to connections (how many, how slowly they may send) is the proxies' here; limits on bodies, rates
and answers are the gateway's as ever. A replica is a gateway to the queue like any other process.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.config import GATEWAY, Settings
from services.errors import RequestError, StartupError, Unavailable
from services.gateway.app import build_app
from services.gateway.auth import Authenticator
from services.gateway.connections import Bounds
from services.gateway.errors_http import error_response
from services.gateway.role import in_service
from services.gateway.stream import Line
from services.model.hub import with_checkpoint
from services.ray.arguments import Arguments, handed_over
from services.ray.keeper import node_address
from services.runtime import configure_logging
from services.runtime.tracing import tracing
from services.supervisor.handover import held_ports

_DISCOVERY = "/metrics/targets"
_REQUEST_ID = "x-request-id"
_LAST_WORDS_S = 10.0
INTRODUCE_S = 10.0
"""How often each replica names its page to the controller."""

log = logging.getLogger(__name__)
Pages = Callable[[], Awaitable[list[dict[str, Any]]]]


class GatewayApp:
    """The gateway's application with a lifespan: it begins when the replica starts, and leaves the queue when it ends.
    Serve ends a replica once its last request has ended, so nothing is left to drain.

    Beside the gateway's own paths it answers GET /metrics/targets, the pages of all processes for Prometheus' HTTP
    service discovery; ``pages`` returns them. Where clients need an API key, that needs one, too: it names addresses
    within the cluster.
    """

    def __init__(self, settings: Settings, pages: Pages) -> None:
        self._settings, self._pages = settings, pages
        self._app: ASGIApp | None = None
        self._authenticator = Authenticator(None)
        self._bounds = Bounds()
        self.failure: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self.failure is not None:  # until Serve has asked for this replica's health
            await error_response(Unavailable("This gateway has ended."))(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "GET" and _path_in_app(scope) == _DISCOVERY:
            await (await self._discover(scope))(scope, receive, send)
        else:
            assert self._app is not None, "Serve sends no request before the lifespan has begun"
            await _Call(self._app, self._bounds, receive).answer(scope, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        settings, begun = self._settings, False
        try:
            with tracing(settings, GATEWAY) as tracer:
                async with in_service(settings, tracer) as gateway:
                    self._app, self._bounds, begun = build_app(gateway.parts), gateway.bounds, True
                    self._authenticator = gateway.parts.authenticator
                    await send({"type": "lifespan.startup.complete"})
                    await receive()
                    await gateway.follower.cancels_heard(set())  # of clients that have just gone
        except StartupError as error:
            log.error("%s", error.message)
            self.failure = error
        except BaseException as error:  # a cancellation, too: a part of the gateway has ended
            log.exception("the gateway ended")
            self.failure = error
        if begun:
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "lifespan.startup.failed", "message": str(self.failure)})

    async def _discover(self, scope: Scope) -> Response:
        try:
            await self._authenticator.identify(Headers(scope=scope).get("authorization"))
        except RequestError as error:
            return error_response(error)
        return Response(json.dumps(await self._pages()), media_type="application/json")


def _path_in_app(scope: Scope) -> str:
    """Return the path below the application's route prefix, which Serve leaves in front of it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _without_known_id(scope: Scope, send: Send) -> Send:
    """Return ``send`` without the id that the request came with: Serve puts it on the answer itself."""
    known = Headers(scope=scope).get(_REQUEST_ID)

    async def once(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if known is not None and headers.get(_REQUEST_ID) == known:
                del headers[_REQUEST_ID]
        await send(message)

    return once


class BrokenOff(Exception):
    """An answer that must not look complete has ended early: Serve breaks its client's connection."""


class _Call:
    """One request. The connection belongs to Serve's proxy, so it is broken by an error."""

    def __init__(self, app: ASGIApp, bounds: Bounds, receive: Receive) -> None:
        self._app, self._bounds, self._receive = app, bounds, receive
        self._aborted = asyncio.Event()

    async def answer(self, scope: Scope, send: Send) -> None:
        line = Line(
            abort=self._aborted.set,
            expire=self._aborted.set,
            now=asyncio.get_running_loop().time,
            stall_s=self._bounds.stall_s,
            min_rate=self._bounds.min_rate,
        )
        line.under(scope)
        await self._app(scope, self._next, _without_known_id(scope, send))
        if self._aborted.is_set():
            raise BrokenOff("the answer is incomplete")

    async def _next(self) -> Message:
        """Return the client's next message; that it is gone, once the answer was broken off."""
        receiving = asyncio.ensure_future(self._receive())
        waits: tuple[asyncio.Future[Any], ...] = (receiving, asyncio.ensure_future(self._aborted.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.is_set():
                return {"type": "http.disconnect"}
            return receiving.result()
        finally:
            for each in waits:
                each.cancel()


class Gateway:
    """A replica. ``controller`` is the handle of the application's controller, which knows where Redis is."""

    async def __init__(self, settings: Mapping[str, Any], controller: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._controller = controller
        shared = Settings(**settings)
        configure_logging(GATEWAY, shared.log_level, shared.log_format)
        url = await controller.redis_url.remote()
        self._ports = ExitStack()
        (page,) = held_ports("0.0.0.0", 1, self._ports)
        own = {"redis_url": url, "redis_url_file": None, "host": "0.0.0.0", "metrics_port": page, "process": GATEWAY}
        self._settings = await asyncio.to_thread(with_checkpoint, shared.model_copy(update=own), weights=False)
        self._page = f"{node_address()}:{page}"
        self._introducing = asyncio.ensure_future(self._introduce())

    def __serve_build_asgi_app__(self) -> GatewayApp:
        async def pages() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = await self._controller.scrape_targets.remote()
            return found

        self._gateway = GatewayApp(self._settings, pages)
        return self._gateway

    async def check_health(self) -> None:
        """Raise where the gateway has ended; Serve calls it and replaces the replica."""
        if self._gateway.failure is not None:
            raise RuntimeError(f"the gateway ended: {self._gateway.failure}")

    async def _introduce(self) -> None:
        """Name this replica's page to the controller, again and again: a controller that starts again knows none."""
        replica = serve.get_replica_context().replica_tag
        while True:
            try:
                await self._controller.introduce.remote(replica, self._page)
            except Exception as error:  # noqa: BLE001  the next time
                log.debug("the controller does not answer: %r", error)
            await asyncio.sleep(INTRODUCE_S)


def ends_after_s(settings: Settings) -> float:
    """Return how long a replica may take to end: Serve waits for open requests, and none is open for longer."""
    return settings.request_timeout + _LAST_WORDS_S


def gateway_of(arguments: Arguments, settings: Settings, controller: Any, class_: type = Gateway) -> Any:
    """Return the deployment of ``class_`` that is the application's way in, bound to its arguments."""
    gateways = arguments.gateways
    deployment = serve.deployment(
        name="Gateway",
        max_ongoing_requests=gateways.max_requests,
        max_queued_requests=gateways.max_queued,
        backpressure_config={"retry_after_s": 1.0},
        autoscaling_config={
            "min_replicas": gateways.min_replicas,
            "max_replicas": gateways.max_replicas,
            "target_ongoing_requests": gateways.target_requests,
        },
        graceful_shutdown_timeout_s=ends_after_s(settings),
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": gateways.cpus}
        | ({"runtime_env": arguments.runtime_env} if arguments.runtime_env else {}),
    )(serve.ingress()(class_))
    return deployment.bind(handed_over(settings), controller)
