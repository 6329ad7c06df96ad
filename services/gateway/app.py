"""The routes. In: HTTP requests. Out: answers in OpenAI's shapes, for which each route asks a collaborator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from services.errors import NotReady, RequestError
from services.gateway import docs_page, openapi
from services.gateway import responses as shapes
from services.gateway.access import note_of
from services.gateway.auth import Authenticator
from services.gateway.errors_http import on_crash, on_http_exception, on_request_error, on_validation_error
from services.gateway.exposition import Siblings
from services.gateway.guard import Guard
from services.gateway.health import Readiness
from services.gateway.idempotency import check_key
from services.gateway.intake import Intake
from services.gateway.job import Job
from services.gateway.middleware import RequestContext, RoundRobin, SameMachine, Turns
from services.gateway.offload import Offload
from services.gateway.openai_format import ChatFormat, CompletionFormat, Format
from services.gateway.parse import B, Parser
from services.gateway.recent import Recent
from services.gateway.refusals import Refusals
from services.gateway.request_trace import TracedRequests
from services.gateway.results import ResultFollower
from services.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from services.gateway.sleep import SleepOrders
from services.gateway.stream import EventResponse, LongResponse, WholeResponse
from services.gateway.tokenize import TokenizerRoutes
from services.metrics import OPENMETRICS, TEXT, GatewayMetrics, PageFormat, format_for
from services.queue.sleep import Sleep
from services.runtime.tracing import Tracer

Key = Annotated[str | None, Header(alias="Idempotency-Key", description="Same key and body: the same answer.")]
Authorization = Annotated[str | None, Header(include_in_schema=False)]
Level = Annotated[str, Query(description="1: weights stay in the memory of the host. 2: they are read again.")]
Mode = Annotated[str, Query(description="wait: requests that run end, or go on after the sleep. There is no other.")]
_NO_TELEMETRY: Any = dict.fromkeys(("auto_configure", "tracing", "metrics", "logs"), False)
"""FastAPI traces by itself where a variable of its own asks for it: each request twice, and what clients sent in it."""
_PAGES_PER_S = 20.0
"""Pages of metrics; making one takes some milliseconds of the event loop."""
_POSTED = (400, 401, 404, 415, 429)
_GENERATION = (*_POSTED, 409)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The collaborators of the routes."""

    intake: Intake
    follower: ResultFollower
    authenticator: Authenticator
    guard: Guard
    tokenizer: TokenizerRoutes
    readiness: Readiness
    sleep: SleepOrders
    siblings: Siblings
    registry: CollectorRegistry
    metrics: GatewayMetrics
    offload: Offload
    version: str
    protected: bool
    same_machine: bool = False
    """Clients need no key and only this machine can connect, so requests that a web page could send are refused."""
    separate_metrics: bool = False
    """/metrics is served by :func:`build_metrics_app` alone."""
    allowed_origins: Sequence[str] = ()
    """Origins of web pages that browsers let use the API; ``*`` is all."""
    tracer: Tracer | None = None


def build_app(parts: Parts) -> ASGIApp:
    """Builds the whole HTTP interface as one ASGI application."""
    app = FastAPI(
        title="expertmesh",
        version=parts.version,
        description="OpenAI-compatible server for Mixture-of-Experts language models.",
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        openapi_url=None,  # FastAPI's own asks for no key, and its pages load scripts of other sites
    )
    app.add_exception_handler(RequestError, on_request_error(Refusals(parts.metrics)))
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_crash)
    _add_generation(app, parts)
    _add_models(app, parts)
    _add_tokenizer(app, parts)
    _add_operations(app, parts)
    _add_sleep(app, parts)
    if not parts.separate_metrics:
        _add_metrics(app, parts)
    paced = RoundRobin(app, Turns(parts.metrics.turns_waiting.set), parts.authenticator.recall)
    inner: ASGIApp = SameMachine(paced) if parts.same_machine else paced
    if parts.allowed_origins:  # outermost, so that a browser may read refusals, too
        inner = CORSMiddleware(
            inner,
            allow_origins=parts.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "traceparent"],
        )
    if parts.tracer is not None:
        inner = TracedRequests(inner, parts.tracer)
    return RequestContext(inner, parts.metrics, lambda: parts.intake.leaving)


def build_metrics_app(parts: Parts) -> ASGIApp:
    """Builds an application that serves /metrics alone, for a port that clients do not reach."""
    app = FastAPI(openapi_url=None, telemetry=_NO_TELEMETRY)
    _add_metrics(app, parts)
    return app


def _add_generation(app: FastAPI, parts: Parts) -> None:
    guard, completion_bodies, chat_bodies = parts.guard, Parser(CompletionBody), Parser(ChatBody)

    @app.post("/v1/completions", **openapi.post(CompletionBody, shapes.CompletionResponse, *_GENERATION, events=True))
    async def completions(request: Request, key: Key = None) -> Response:
        """Continues a prompt."""
        caller = await guard.enter(request)
        async with guard.body(completion_bodies, request, caller) as body:
            job = await parts.intake.completion(body, caller, note_of(request.scope).ids, check_key(key))
        return _answer(parts, request, job, body, CompletionFormat, logprobs=body.logprobs is not None)

    @app.post("/v1/chat/completions", **openapi.post(ChatBody, shapes.ChatResponse, *_GENERATION, events=True))
    async def chat(request: Request, key: Key = None) -> Response:
        """Answers a conversation, through the checkpoint's chat template."""
        caller = await guard.enter(request)
        async with guard.body(chat_bodies, request, caller) as body:
            job = await parts.intake.chat(body, caller, note_of(request.scope).ids, check_key(key))
        return _answer(parts, request, job, body, ChatFormat, logprobs=body.logprobs or False)


def _answer(
    parts: Parts, request: Request, job: Job, body: GenerationBody, form: type[Format], *, logprobs: bool
) -> Response:
    model, note = parts.intake.prompts.model, note_of(request.scope)
    options = body.stream_options
    rendered = form(
        job,
        model=model.name,
        codec=model.codec,
        logprobs=logprobs,
        token_ids=body.return_token_ids or False,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    note.model, note.job, note.completion = model.name, job, rendered.id
    kind = EventResponse if body.stream else WholeResponse
    delivered = parts.metrics.delivery.observe
    return kind(job, rendered, parts.follower.abandon, parts.offload, parts.intake.holdings, delivered)


def _add_models(app: FastAPI, parts: Parts) -> None:
    prompts = parts.intake.prompts

    def card() -> shapes.ModelCard:
        model = prompts.model
        return shapes.ModelCard(id=model.name, created=model.created, max_model_len=prompts.max_model_len)

    @app.get("/v1/models", responses=openapi.refusals(401))
    async def models(authorization: Authorization = None) -> shapes.ModelList:
        """Returns the served model, also while no worker runs."""
        await parts.authenticator.identify(authorization)
        return shapes.ModelList(data=[card()])

    @app.get("/v1/models/{model_id:path}", responses=openapi.refusals(401, 404))
    async def model(model_id: str, authorization: Authorization = None) -> shapes.ModelCard:
        await parts.authenticator.identify(authorization)
        prompts.check_model(model_id)
        return card()


def _add_tokenizer(app: FastAPI, parts: Parts) -> None:
    routes, guard = parts.tokenizer, parts.guard
    texts, tokens = Parser(TokenizeBody), Parser(DetokenizeBody)

    async def respond(request: Request, bodies: Parser[B], make: Callable[[B, str], Awaitable[bytes]]) -> Response:
        caller = await guard.enter(request)
        async with guard.body(bodies, request, caller) as body:
            answer = await make(body, caller.tenant)
        guard.hold(request, caller, len(answer))
        return LongResponse(answer)

    @app.post("/tokenize", **openapi.post(TokenizeBody, shapes.TokenizeResponse, *_POSTED))
    async def tokenize(request: Request) -> Response:
        """Returns the token ids of a text or of messages."""
        return await respond(request, texts, routes.tokenize)

    @app.post("/detokenize", **openapi.post(DetokenizeBody, shapes.DetokenizeResponse, *_POSTED))
    async def detokenize(request: Request) -> Response:
        """Returns the text of token ids, special tokens included."""
        return await respond(request, tokens, routes.detokenize)

    @app.get("/tokenizer_info", responses=openapi.refusals(401))
    async def tokenizer_info(authorization: Authorization = None) -> shapes.TokenizerInfo:
        """Returns the special tokens and the chat template."""
        await parts.authenticator.identify(authorization)
        model = parts.intake.prompts.model
        return shapes.TokenizerInfo(
            **asdict(model.codec.special), chat_template=None if model.template is None else model.template.source
        )


def _add_operations(app: FastAPI, parts: Parts) -> None:
    @app.get("/health", responses=openapi.refusals())
    async def health() -> shapes.Status:
        """Answers 200 while the process lives, also while the model sleeps."""
        return shapes.Status(status="sleeping" if await parts.sleep.sleeping() else "ok")

    @app.get("/ready", responses=openapi.refusals())
    async def ready() -> shapes.Status:
        """Answers 200 when a request would be served; otherwise 503, naming what is missing."""
        missing = ["shutting down"] if parts.intake.leaving else await parts.readiness.missing()
        missing += ["a wake-up"] if await parts.sleep.sleeping() else []
        if missing:
            raise NotReady(f"Not ready; missing: {', '.join(missing)}.", retry_after_s=1.0)
        return shapes.Status(status="ready")

    @app.get("/accepting", responses=openapi.refusals())
    async def accepting() -> shapes.Status:
        """Answers 200 while requests may come here, though they may have to wait for a worker; for load balancers."""
        if parts.intake.leaving:
            raise NotReady("This gateway is shutting down.", retry_after_s=1.0)
        if not parts.readiness.connected():
            raise NotReady("Redis has not answered yet.", retry_after_s=1.0)
        return shapes.Status(status="accepting")

    @app.get("/version", responses=openapi.refusals())
    async def version() -> shapes.Version:
        return shapes.Version(version=parts.version)

    _add_documents(app, parts)


def _add_sleep(app: FastAPI, parts: Parts) -> None:
    done: openapi.Responses = {202: {"model": shapes.IsSleeping, "description": "Ordered; workers are still at it."}}
    refusals, orders = openapi.refusals(400, 401, 403, 404, 415, 503), parts.sleep

    def answer(found: Sleep) -> Response:
        body = shapes.IsSleeping(is_sleeping=found.sleeping).model_dump_json()
        return Response(body, status_code=202 if found.behind else 200, media_type="application/json")

    @app.post("/sleep", response_model=shapes.IsSleeping, responses=done | refusals)
    async def sleep(
        request: Request, authorization: Authorization = None, level: Level = "1", mode: Mode = "wait"
    ) -> Response:
        """Frees the memory of all workers, once running requests have ended or gone back to the queue."""
        del level, mode  # for the document: a wrong one gets an error like all others
        return answer(await orders.sleep(request, authorization))

    @app.post("/wake_up", response_model=shapes.IsSleeping, responses=done | refusals)
    async def wake_up(request: Request, authorization: Authorization = None) -> Response:
        """Takes the memory again; the requests that came meanwhile are served."""
        return answer(await orders.wake_up(request, authorization))

    @app.get("/is_sleeping", responses=openapi.refusals(401, 404))
    async def is_sleeping(authorization: Authorization = None) -> shapes.IsSleeping:
        """Says whether requests wait for a wake-up."""
        return shapes.IsSleeping(is_sleeping=(await orders.look(authorization)).sleeping)


def _add_documents(app: FastAPI, parts: Parts) -> None:
    pages = {"docs": "/docs", "openapi": "/openapi.json", "health": "/health", "models": "/v1/models"}
    links = msgspec.json.encode(pages if parts.separate_metrics else pages | {"metrics": "/metrics"})

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        """Names the pages of this server to whoever asks."""
        return Response(links, media_type="application/json")

    @cache  # all clients share one, also clients that do not read it
    def document(model: str) -> dict[str, Any]:
        return openapi.document(app, protected=parts.protected, model=model)

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(parts.intake.prompts.model.name))

    @cache
    def rendered() -> bytes:
        return docs_page.page(document("MODEL" if parts.protected else parts.intake.prompts.model.name))

    @app.get("/openapi.json", include_in_schema=False)
    async def schema(authorization: Authorization = None) -> Response:
        await parts.authenticator.identify(authorization)  # it names the model, as /v1/models does
        return Response(encoded(), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Shows the API to whoever asks, since browsers send no key. Where keys are on it does not name the model."""
        return Response(rendered(), media_type="text/html", headers=docs_page.HEADERS)


def _add_metrics(app: FastAPI, parts: Parts) -> None:
    async def make(form: PageFormat) -> bytes:
        return (await parts.siblings.page(form.encode(parts.registry).decode(), form)).encode()

    pages = {form: Recent(partial(make, form), _PAGES_PER_S) for form in (TEXT, OPENMETRICS)}  # anybody may ask

    text: openapi.Responses = {
        200: {"content": {form.media_type: {"schema": {"type": "string"}} for form in (TEXT, OPENMETRICS)}}
    }

    @app.get("/metrics", responses=text | openapi.refusals(), response_class=Response)
    async def metrics(request: Request) -> Response:
        """Returns the Prometheus series of this process and its siblings, in OpenMetrics where that is accepted."""
        form = format_for(request.headers.get("accept", ""))
        return Response(await pages[form].get(), headers={"content-type": form.content_type})
