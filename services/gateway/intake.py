"""Makes admitted jobs of parsed bodies: model name, limits, sampling, admission.

In: bodies of ``schema.py`` and the :class:`Caller`. Out: a :class:`Job` with its sequences in the queue.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from services.errors import ContextLengthExceeded, Draining, InvalidRequest, QueueUnavailable, UnsupportedParameter
from services.gateway.admission import Admission
from services.gateway.auth import Caller
from services.gateway.budget import Budget, Demand, Holdings, Loan
from services.gateway.detokenize import StopSet
from services.gateway.echo import Echo, Spelled
from services.gateway.idempotency import KeyedJobs, Origin, fingerprint, new_origin
from services.gateway.job import Choice, Job, Rendering
from services.gateway.offload import Offload
from services.gateway.ports import Queue
from services.gateway.prompts import Prompt, PromptReader
from services.gateway.results import ResultFollower
from services.gateway.schema import MAX_SEQUENCES, ChatBody, CompletionBody, GenerationBody, TemplateOptions
from services.gateway.sequence_trace import traced_sequence
from services.gateway.table import JobTable
from services.messages import GenerateRequest, SamplingParams
from services.metrics import GatewayMetrics
from services.queue.prompts import pack_ids, prompt_name
from services.request_ids import RequestIds, sequence_id
from services.runtime.tracing import span_here
from services.wire import WIRE

_EFFORT = "reasoning_effort"
_DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's
_AWAY_RETRY_S = 2.0
_SEED_MASK = 2**63 - 1
_MAX_STOP_CHARS = 4096  # all stop strings of a request together
_MAX_ECHO_BYTES = 16 << 20  # all prompts of a request together, each once
_INLINE_IDS = 4096  # longer prompts are decoded in a thread


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A request with its defaults filled in, before ids, seed and admission."""

    arrived: float
    prompts: Sequence[Prompt]
    n: int
    max_tokens: int
    logprobs: int | None
    priority: int
    echo: bool = False

    @property
    def demand(self) -> Demand:
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        return Demand(lengths=lengths, n=self.n, logprobs=self.logprobs, echo=self.echo)


class Intake:
    """Admits generation requests. ``draining`` makes it refuse new requests; ``leaving`` says that it soon will.
    ``asked_at`` is when the last request came, by ``time.monotonic``."""

    def __init__(
        self,
        *,
        prompts: PromptReader,
        queue: Queue,
        table: JobTable,
        follower: ResultFollower,
        metrics: GatewayMetrics,
        incarnation: str,
        request_timeout_s: float,
        max_queued_requests: int,
        max_queued_tokens: int,
        keep_s: float,
        offload: Offload,
    ) -> None:
        self.leaving = False
        self.draining = False
        self.asked_at = 0.0
        self.prompts = prompts
        self._table = table
        self._follower = follower
        self._metrics = metrics
        self._incarnation = incarnation
        self._admission = Admission(queue, table, follower, timeout_s=request_timeout_s)
        self._max_sequences = min(MAX_SEQUENCES, max_queued_requests)
        self._budget = Budget(tokens=max_queued_tokens)
        self._offload = offload
        self._keyed = KeyedJobs(table.holdings, keep_s=keep_s)

    @property
    def holdings(self) -> Holdings:
        """The account of the answers' memory."""
        return self._table.holdings

    async def completion(self, body: CompletionBody, caller: Caller, ids: RequestIds, key: str | None = None) -> Job:
        """Returns the job for ``POST /v1/completions``, called ``ids.base`` if it is a new one. Raises
        RequestError for a fault of the client or a refusal."""
        arrived = time.monotonic()
        self._check_open(body)
        self._check_count(len(body.prompts) * (body.n or 1), caller)
        with span_here("tokenize"):
            prompts = await self.prompts.of_completion(body, caller.tenant, self._budget.tokens)
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens is 0 without echo.", hint="Ask for at least 1 token.", param="max_tokens")
        plan = _Plan(
            arrived=arrived,
            prompts=prompts,
            n=body.n or 1,
            max_tokens=min(_DEFAULT_MAX_TOKENS, self.prompts.room_after(prompts)),
            logprobs=body.logprobs,
            priority=caller.priority(body.priority),
            echo=body.echo or False,
        )
        return await self._run(body, plan, body.max_tokens, caller, ids, key)

    async def chat(self, body: ChatBody, caller: Caller, ids: RequestIds, key: str | None = None) -> Job:
        """Returns the job for ``POST /v1/chat/completions``. Raises as :meth:`completion`."""
        arrived = time.monotonic()
        self._check_open(body)
        self._check_count(body.n or 1, caller)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs.", hint="Set logprobs to true.", param="top_logprobs")
        with span_here("tokenize"):
            prompt = await self.prompts.of_messages(
                body.messages,
                body.add_generation_prompt,
                self._template_options(body),
                body.parse_special_tokens,
                caller.tenant,
            )
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if wanted == 0:
            raise InvalidRequest("max_tokens is 0.", hint="Ask for at least 1 token.", param="max_tokens")
        plan = _Plan(
            arrived=arrived,
            prompts=[prompt],
            n=body.n or 1,
            max_tokens=self.prompts.room_after([prompt]),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            priority=caller.priority(body.priority),
        )
        return await self._run(body, plan, wanted, caller, ids, key)

    def _template_options(self, body: ChatBody) -> TemplateOptions | None:
        """Returns the template's switches. Raises UnsupportedParameter where it has none for the effort."""
        if body.reasoning_effort is None:
            return body.chat_template_kwargs
        template = self.prompts.model.template
        if template is None or _EFFORT not in template.source:
            raise UnsupportedParameter(
                f"{_EFFORT} is not supported for this model: its chat template has no such switch.", param=_EFFORT
            )
        return {**(body.chat_template_kwargs or {}), _EFFORT: body.reasoning_effort}

    def _check_open(self, body: GenerationBody) -> None:
        self.asked_at = time.monotonic()
        self.prompts.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream.", hint="Set stream to true.", param="stream_options")
        if self.draining:
            raise Draining("This server is shutting down.", hint="Send the request again.", retry_after_s=1.0)
        if not self._follower.up:
            raise QueueUnavailable("The queue does not answer.", hint="Try again soon.", retry_after_s=_AWAY_RETRY_S)

    def _check_count(self, sequences: int, caller: Caller) -> None:
        """Refuses a request that admission would always refuse: a 429 would make the client retry for ever."""
        allowed = caller.limits.concurrency if caller.limits else None
        limit = self._max_sequences if allowed is None else min(allowed, self._max_sequences)
        if sequences > limit:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences (prompts times n); the maximum is {limit}.",
                hint="Split it into several requests.",
                param="n",
            )

    async def _run(
        self,
        body: GenerationBody,
        plan: _Plan,
        wanted: int | None,
        caller: Caller,
        ids: RequestIds,
        key: str | None,
    ) -> Job:
        """Returns the job of ``plan`` with ``wanted`` tokens, by default as many of the plan's as the budget admits."""
        if wanted is None:
            wanted = self._budget.largest_max_tokens(plan.demand, plan.max_tokens)
        plan = replace(plan, max_tokens=wanted)
        self._check(body, plan)
        self._table.holdings.check(caller.tenant)
        self._follower.cancel(self._table.make_room())

        async def start(origin: Origin) -> Job:
            with self._table.holdings.lend(caller.tenant) as loan:
                job = self._job(body, plan, await self._echoes(plan, caller, loan), origin, caller)
            return await self._admit(job, origin, caller)

        if key is None:
            return await start(new_origin(ids.base))
        content = fingerprint(type(body).__name__, body.canonical())
        return await self._keyed.run(caller.tenant, key, content, ids.base, start)

    async def _echoes(self, plan: _Plan, caller: Caller, loan: Loan) -> list[Spelled]:
        """Returns the texts of prompts that the answer repeats. Raises InvalidRequest where they are too long."""
        echoes: list[Spelled] = []
        for prompt in plan.prompts if plan.echo else ():
            echoes.append(await self._echo(prompt, caller))
            loan.grow(len(echoes[-1].data))
            self._table.holdings.check(caller.tenant)
            if loan.size > _MAX_ECHO_BYTES:
                raise InvalidRequest(
                    f"The prompts have over {_MAX_ECHO_BYTES >> 20} MiB of text, too much to echo.",
                    hint="Send fewer, or leave echo out.",
                    param="echo",
                )
        return echoes

    async def _echo(self, prompt: Prompt, caller: Caller) -> Spelled:
        """Returns the text of ``prompt``, also where the client sent token ids."""

        def spell() -> Spelled:
            return Spelled.of(self.prompts.model.codec.decode(prompt.token_ids) if prompt.text is None else prompt.text)

        if len(prompt.token_ids) <= _INLINE_IDS or prompt.text is not None:
            return spell()
        return await self._offload.run(caller.tenant, spell)

    def _check(self, body: GenerationBody, plan: _Plan) -> None:
        room = self.prompts.max_model_len
        for prompt in plan.prompts:
            length = len(prompt.token_ids)
            if not length:
                raise InvalidRequest("A prompt is empty.", hint="Send some text or token ids.", param="prompt")
            if length + plan.max_tokens > room:
                raise ContextLengthExceeded(
                    f"The request needs {length + plan.max_tokens} tokens ({length} of the prompt and "
                    f"{plan.max_tokens} to generate); the context holds {room}.",
                    hint="Shorten the prompt or lower max_tokens.",
                    param="prompt",
                )
            self.prompts.check_ids(prompt.token_ids, "prompt")
        self._budget.check(plan.demand, plan.max_tokens)
        self._check_stops(body.stops)
        self.prompts.check_ids([int(token_id) for token_id in body.logit_bias or {}], "logit_bias")
        self.prompts.check_ids(body.stop_token_ids or (), "stop_token_ids")
        if (body.min_tokens or 0) > plan.max_tokens:
            raise InvalidRequest(
                f"min_tokens {body.min_tokens} exceeds max_tokens {plan.max_tokens}.",
                hint="Lower it.",
                param="min_tokens",
            )

    def _check_stops(self, stops: Sequence[str]) -> None:
        length = sum(map(len, stops))
        if length > _MAX_STOP_CHARS:
            raise InvalidRequest(
                f"The stop strings have {length} characters; the maximum is {_MAX_STOP_CHARS}.",
                hint="Send fewer or shorter ones.",
                param="stop",
            )

    def _job(self, body: GenerationBody, plan: _Plan, echoes: Sequence[Spelled], origin: Origin, caller: Caller) -> Job:
        codec, scored = self.prompts.model.codec, plan.logprobs is not None
        stops = StopSet(body.stops) if body.stops else None
        sampling = _sampling(body, plan, origin.seed)
        choices: list[Choice] = []
        for number, prompt in enumerate(plan.prompts):
            ids = array("i", prompt.token_ids)
            name = prompt_name(caller.tenant, pack_ids(ids))
            echo = Echo(echoes[number], ids, codec, scored=scored) if plan.echo else None
            rendering = Rendering(
                stops=stops,
                echo=echo,
                logprobs=scored,
                token_ids=body.return_token_ids or False,
                marks=self.prompts.model.marks if isinstance(body, ChatBody) else None,
            )
            for draw in range(plan.n):
                index = len(choices)
                request = GenerateRequest(
                    id=sequence_id(origin.base_id, index),
                    attempt=1,
                    token_ids=[],
                    prompt_len=len(ids),
                    sampling=structs.replace(
                        sampling,
                        choice=draw,
                        prompt_logprobs=plan.logprobs if plan.echo and draw == 0 else None,  # scored once, for all
                    ),
                    deadline_ms=0,  # set by the queue, by Redis TIME
                    priority=plan.priority,
                    tenant=caller.tenant,
                    reply_to=self._incarnation,
                    prompt=name,
                    wire=WIRE,
                    cache_salt=body.cache_salt or "",
                )
                request, trace = traced_sequence(request, index)
                choices.append(Choice(index, request, ids, codec, rendering, trace))
        return Job(
            job_id=origin.base_id,
            choices=choices,
            n=plan.n,
            tenant=caller.tenant,
            created=int(time.time()),
            arrived=plan.arrived,
        )

    async def _admit(self, job: Job, origin: Origin, caller: Caller) -> Job:
        with span_here("admission"):
            await self._admission.admit(job, origin, caller.limits)
        self._metrics.admission.observe(time.monotonic() - job.arrived)
        lengths = [len(choice.prompt) for choice in job.choices[:: job.n]]
        self._metrics.prompt_tokens.inc(sum(lengths))
        for length in lengths:
            self._metrics.prompt_len.observe(length)
        return job


def _sampling(body: GenerationBody, plan: _Plan, drawn_seed: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return SamplingParams(
        max_tokens=plan.max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=given(body.min_p, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        logit_bias={int(token_id): float(bias) for token_id, bias in (body.logit_bias or {}).items()},
        seed=(drawn_seed if body.seed is None else body.seed) & _SEED_MASK,
        logprobs=plan.logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
        speculation=body.speculation or "auto",
    )
