"""The routes. Each reads its body, asks a collaborator, and answers in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from services.errors import InvalidRequest, NotReady, RequestError
from services.gateway import openapi
from services.gateway import responses as shapes
from services.gateway.auth import Authenticator
from services.gateway.errors_http import on_crash, on_http_exception, on_request_error, on_validation_error
from services.gateway.exposition import Siblings
from services.gateway.health import Readiness
from services.gateway.idempotency import check_key
from services.gateway.intake import Intake
from services.gateway.job import Job
from services.gateway.middleware import BodyLimit, RequestContext
from services.gateway.offload import Offload
from services.gateway.openai_format import ChatFormat, CompletionFormat, Format
from services.gateway.prompts import PromptReader
from services.gateway.results import ResultFollower
from services.gateway.schema import B, ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody, parse
from services.gateway.stream import EventResponse, WholeResponse
from services.metrics import CONTENT_TYPE, GatewayMetrics

Key = Annotated[str | None, Header(alias="Idempotency-Key", description="Same key and body: the same answer.")]
Authorization = Annotated[str | None, Header(include_in_schema=False)]
_GENERATION = (400, 401, 404, 409, 429, 503)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the routes work with."""

    intake: Intake
    follower: ResultFollower
    authenticator: Authenticator
    readiness: Readiness
    siblings: Siblings
    registry: CollectorRegistry
    metrics: GatewayMetrics
    offload: Offload
    version: str
    protected: bool
    max_body_bytes: int
    metrics_apart: bool = False
    """/metrics is served by :func:`build_metrics_app` alone."""


def build_app(parts: Parts) -> ASGIApp:
    """The whole HTTP interface as one ASGI application."""
    app = FastAPI(
        title="expertmesh",
        version=parts.version,
        description="OpenAI-compatible server for Mixture-of-Experts language models.",
        redirect_slashes=False,
    )
    app.openapi = lambda: _cached_document(app, parts)  # type: ignore[method-assign]
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_crash)
    _add_generation(app, parts)
    _add_models(app, parts)
    _add_tokenizer(app, parts)
    _add_operations(app, parts)
    if not parts.metrics_apart:
        _add_metrics(app, parts)
    return RequestContext(BodyLimit(app, parts.max_body_bytes), parts.metrics, lambda: parts.intake.leaving)


def build_metrics_app(parts: Parts) -> ASGIApp:
    """/metrics alone, for a port that clients do not reach."""
    app = FastAPI(openapi_url=None)
    _add_metrics(app, parts)
    return app


def _cached_document(app: FastAPI, parts: Parts) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = openapi.document(app, protected=parts.protected, model=parts.intake.prompts.model.name)
    return app.openapi_schema


def _add_generation(app: FastAPI, parts: Parts) -> None:
    refusals = openapi.refusals(*_GENERATION)

    @app.post(
        "/v1/completions",
        responses={200: {"model": shapes.CompletionResponse} | openapi.events(), **refusals},
        openapi_extra=openapi.takes(CompletionBody),
    )
    async def completions(request: Request, key: Key = None, authorization: Authorization = None) -> Response:
        """Continues a prompt."""
        caller = await parts.authenticator.identify(authorization)
        body = await _read(CompletionBody, request)
        job = await parts.intake.completion(body, caller, _checked(key))
        return _answer(parts, job, body, CompletionFormat, logprobs=body.logprobs is not None)

    @app.post(
        "/v1/chat/completions",
        responses={200: {"model": shapes.ChatResponse} | openapi.events(), **refusals},
        openapi_extra=openapi.takes(ChatBody),
    )
    async def chat(request: Request, key: Key = None, authorization: Authorization = None) -> Response:
        """Answers a conversation, through the checkpoint's chat template."""
        caller = await parts.authenticator.identify(authorization)
        body = await _read(ChatBody, request)
        job = await parts.intake.chat(body, caller, _checked(key))
        return _answer(parts, job, body, ChatFormat, logprobs=body.logprobs or False)


async def _read(body_type: type[B], request: Request) -> B:
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise InvalidRequest(f"Bodies in {coding[:40]!r} are not read here.", hint="Send plain JSON, uncompressed.")
    return parse(body_type, await request.body())


def _checked(key: str | None) -> str | None:
    return None if key is None else check_key(key)


def _answer(parts: Parts, job: Job, body: GenerationBody, form: type[Format], *, logprobs: bool) -> Response:
    model = parts.intake.prompts.model
    options = body.stream_options
    rendered = form(
        job,
        model=model.name,
        codec=model.codec,
        logprobs=logprobs,
        token_ids=body.return_token_ids or False,
        include_usage=bool(options and options.include_usage),
    )
    kind = EventResponse if body.stream else WholeResponse
    return kind(job, rendered, parts.follower.abandon, parts.offload)


def _add_models(app: FastAPI, parts: Parts) -> None:
    prompts = parts.intake.prompts

    def card() -> shapes.ModelCard:
        model = prompts.model
        return shapes.ModelCard(id=model.name, created=model.created, max_model_len=prompts.max_model_len)

    @app.get("/v1/models", responses=openapi.refusals(401, 503))
    async def models(authorization: Authorization = None) -> shapes.ModelList:
        """The served model, also while no worker runs."""
        await parts.authenticator.identify(authorization)
        return shapes.ModelList(data=[card()])

    @app.get("/v1/models/{model_id:path}", responses=openapi.refusals(401, 404, 503))
    async def model(model_id: str, authorization: Authorization = None) -> shapes.ModelCard:
        await parts.authenticator.identify(authorization)
        prompts.check_model(model_id)
        return card()


def _add_tokenizer(app: FastAPI, parts: Parts) -> None:
    prompts, refusals = parts.intake.prompts, openapi.refusals(400, 401, 404, 503)

    @app.post(
        "/tokenize",
        responses={200: {"model": shapes.TokenizeResponse}, **refusals},
        openapi_extra=openapi.takes(TokenizeBody),
    )
    async def tokenize(request: Request, authorization: Authorization = None) -> Response:
        """Token ids of a text or of messages."""
        await parts.authenticator.identify(authorization)
        body = await _read(TokenizeBody, request)
        prompts.check_model(body.model)
        token_ids = await _token_ids(prompts, body)
        codec, named = prompts.model.codec, body.return_token_strs
        return await _encoded(
            lambda: {
                "count": len(token_ids),
                "max_model_len": prompts.max_model_len,
                "tokens": token_ids,
                "token_strs": [codec.token_text(token_id) for token_id in token_ids] if named else None,
            }
        )

    @app.post(
        "/detokenize",
        responses={200: {"model": shapes.DetokenizeResponse}, **refusals},
        openapi_extra=openapi.takes(DetokenizeBody),
    )
    async def detokenize(request: Request, authorization: Authorization = None) -> Response:
        """The text of token ids, special tokens included."""
        await parts.authenticator.identify(authorization)
        body = await _read(DetokenizeBody, request)
        prompts.check_model(body.model)
        prompts.check_ids(body.tokens, "tokens")
        return await _encoded(lambda: {"prompt": prompts.model.codec.decode(body.tokens)})

    @app.get("/tokenizer_info", responses=openapi.refusals(401, 503))
    async def tokenizer_info(authorization: Authorization = None) -> shapes.TokenizerInfo:
        """Special tokens and the chat template."""
        await parts.authenticator.identify(authorization)
        template = prompts.model.template
        return shapes.TokenizerInfo(
            **asdict(prompts.model.codec.special), chat_template=None if template is None else template.source
        )


async def _encoded(build: Callable[[], dict[str, object]]) -> Response:
    """``build()`` as JSON, made in a thread: it may be millions of tokens, and open streams go on meanwhile."""
    content = await asyncio.to_thread(lambda: msgspec.json.encode(build()))
    return Response(content, media_type="application/json")


async def _token_ids(prompts: PromptReader, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Exactly one of prompt and messages is needed.", hint="Leave one out.", param="prompt")
    if body.messages is not None:
        prompt = await prompts.of_messages(body.messages, body.add_generation_prompt, None, body.parse_special_tokens)
        return prompt.token_ids
    return await prompts.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)


def _add_operations(app: FastAPI, parts: Parts) -> None:
    @app.get("/health", responses=openapi.refusals())
    async def health() -> shapes.Status:
        """200 while the process lives."""
        return shapes.Status(status="ok")

    @app.get("/ready", responses=openapi.refusals(503))
    async def ready() -> shapes.Status:
        """200 when a request would be served; otherwise 503, naming what is missing."""
        missing = ["shutting down"] if parts.intake.leaving else await parts.readiness.missing()
        if missing:
            raise NotReady(f"Not ready; missing: {', '.join(missing)}.", retry_after_s=1.0)
        return shapes.Status(status="ready")

    @app.get("/accepting", responses=openapi.refusals(503))
    async def accepting() -> shapes.Status:
        """200 while requests may come here, though they may have to wait for a worker: what load balancers ask."""
        if parts.intake.leaving:
            raise NotReady("This gateway is shutting down.", retry_after_s=1.0)
        if not parts.readiness.connected():
            raise NotReady("Redis has not answered yet.", retry_after_s=1.0)
        return shapes.Status(status="accepting")

    @app.get("/version", responses=openapi.refusals())
    async def version() -> shapes.Version:
        return shapes.Version(version=parts.version)


def _add_metrics(app: FastAPI, parts: Parts) -> None:
    @app.get("/metrics", responses=openapi.plain_text() | openapi.refusals(), response_class=Response)
    async def metrics() -> Response:
        """Prometheus series of this process and its siblings."""
        own = generate_latest(parts.registry).decode()
        return Response(await parts.siblings.page(own), headers={"content-type": CONTENT_TYPE})
