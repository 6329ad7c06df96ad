"""From options to the plan of a run."""

from __future__ import annotations

import argparse
import math
import os
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from loadgen.answers import Answers, read_answers
from loadgen.client import Endpoint
from loadgen.errors import BadSetting, FileUnusable
from loadgen.manners import Manners
from loadgen.plan import Closed, Limits, Plan
from loadgen.preflight import Server, accepts_tools, find_server, learned, warm_up
from loadgen.schedule.curve import RateCurve
from loadgen.schedule.schedule import Schedule, arrivals, at_once
from loadgen.schedule.traces import Cut, Recorded, Replay, read_replay
from loadgen.workload.bodies import Bodies
from loadgen.workload.conversation import Source
from loadgen.workload.files import read_prompts
from loadgen.workload.hot_experts import HotExperts, hot_experts, read_recording
from loadgen.workload.lengths import EXPERT_FLOW_REQUESTS, LENGTHS
from loadgen.workload.synthetic import Agents, Chat, Replayed, Singles
from loadgen.workload.tenants import WithTenants, read_tenants
from loadgen.workload.words import Lengths, Prompts

_KEY = "OPENAI_API_KEY"


def schedule_of(options: argparse.Namespace) -> tuple[Schedule | Closed, Replay | None]:
    """Returns when requests are due, and the trace that it comes from, if it does.

    Raises:
        BadSetting: options contradict one another.
    """
    replay, requests = None, options.requests
    if options.workload == "expertflow" and requests is None:
        requests = EXPERT_FLOW_REQUESTS
    chosen = [name for name in ("rate", "trace", "concurrency") if getattr(options, name) is not None]
    if len(chosen) > 1:
        raise BadSetting(f"--{chosen[0]} and --{chosen[1]} contradict one another.", hint="Give one of them.")
    if options.concurrency is not None:
        if requests is None and options.duration is None:
            raise BadSetting("The clients have no end.", hint="Give --requests N or --duration SECONDS.")
        return Closed(options.concurrency, requests, options.duration), None
    if options.trace is not None:
        end = math.inf if options.trace_to is None else options.trace_to
        cut = Cut(
            begin=options.trace_from,
            end=end,
            speed=options.trace_speed,
            scale=options.scale_requests,
            requests=requests,
        )
        replay = read_replay(options.trace, cut, seed=options.seed)
        return replay.schedule, replay
    if isinstance(options.rate, RateCurve):
        curve, gaps = options.rate, options.gaps
        return arrivals(curve, gaps, seed=options.seed, requests=requests, seconds=options.duration), None
    if options.rate is None:
        raise BadSetting(
            "It is not said when requests are due.", hint="Give --rate R, --trace FILE or --concurrency N."
        )
    if requests is None:
        raise BadSetting("--rate inf sends all at once, and nothing says how many.", hint="Give --requests N.")
    return at_once(requests), None


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    if options.endpoint is not None:
        return "chat" if options.endpoint == "chat" else "completions"
    return "chat" if options.workload in ("chat", "agents") else "completions"


def source_of(options: argparse.Namespace, endpoint: Endpoint, replay: Replay | None, *, tools: bool) -> Source:
    """Returns the workload.

    Raises:
        LoadError: a file that it needs is missing or of another form.
    """
    kind, seed = options.workload, options.seed
    prompt_tokens = options.prompt_tokens or LENGTHS[kind][0]
    output_tokens = options.output_tokens or LENGTHS[kind][1]
    prompts = Prompts(endpoint == "completions" and not options.text, vocabulary=options.vocabulary)
    if kind in ("lengths", "expertflow", "long"):
        return Singles(prompts=prompts, prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=seed)
    if kind == "chat":
        return Chat(
            prompts=prompts,
            prefixes=options.prefixes,
            system_tokens=options.prefix_tokens,
            turns=options.turns or Lengths(1, 5),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            think_s=options.think,
            seed=seed,
        )
    if kind == "agents":
        steps = options.turns or Lengths(2, 6)
        return Agents(
            prompts=prompts,
            steps=steps,
            result_tokens=prompt_tokens,
            output_tokens=output_tokens,
            tools=tools,
            seed=seed,
        )
    if kind == "trace":
        return Replayed(prompts=prompts, requests=_recorded(replay), seed=seed)
    if kind == "file":
        return read_prompts(
            _needed(options.prompts, "--workload file", "--prompts FILE"), most_tokens=output_tokens.most
        )
    return _hot(options, output_tokens.most)


def _recorded(replay: Replay | None) -> list[Recorded]:
    if replay is None:
        raise BadSetting("--workload trace needs a trace.", hint="Give --trace FILE.")
    return list(replay.requests)


def _needed(value: Any, what: str, option: str) -> Any:
    if value is None:
        raise BadSetting(f"{what} needs {option}.")
    return value


def _hot(options: argparse.Namespace, output_tokens: int) -> HotExperts:
    experts = _needed(options.hot_experts, "--workload hot-experts", "--hot-experts LAYER:EXPERT,...")
    recording = read_recording(_needed(options.recording, "--workload hot-experts", "--recording FILE"))
    more: dict[str, list[str]] = {}
    if options.prompts is not None:
        for each in read_prompts(options.prompts, most_tokens=output_tokens).conversations:
            turn = each.turns[0]
            if turn.name is not None and isinstance(turn.content, str):
                more.setdefault(turn.name, []).append(turn.content)
    return hot_experts(recording, experts, keep=options.hot_prompts, output_tokens=output_tokens, more_prompts=more)


def key_of(options: argparse.Namespace) -> str | None:
    """Returns the API key of clients without a tenant."""
    if options.api_key_file is None:
        return os.environ.get(_KEY) or None
    try:
        return str(options.api_key_file.expanduser().read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FileUnusable(f"Cannot read the key {options.api_key_file}: {error}.") from error


def common_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns what every body has."""
    try:
        more = msgspec.json.decode(options.body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadSetting(f"--body is no JSON object: {error}.") from error
    common: dict[str, object] = {"temperature": options.temperature}
    if options.ignore_eos:
        common["ignore_eos"] = True
    return common | more


def finish_options(options: argparse.Namespace) -> None:
    """Choose the workload where it follows from other options."""
    if options.workload is None:
        by_file = {
            "trace": getattr(options, "trace", None),
            "file": options.prompts,
            "hot-experts": options.hot_experts,
        }
        options.workload = next((name for name in ("hot-experts", "trace", "file") if by_file[name]), "lengths")


def plan_of(
    options: argparse.Namespace, load: Schedule | Closed, replay: Replay | None, settings: dict[str, object]
) -> Plan:
    """Returns the plan of a run, after looking at the server. What was asked to be sent before has been sent.

    Raises:
        LoadError: an option, a file or the server cannot be used.
    """
    url, key = options.url.rstrip("/").removesuffix("/v1"), key_of(options)
    _check_certificates(options.ca_file)
    endpoint = endpoint_of(options)
    tenants = read_tenants(options.tenants) if options.tenants else ()
    asking = next((tenant.key for tenant in tenants if tenant.key), key)
    server = find_server(url, options.model, asking, options.ca_file, options.wait)
    source = source_of(options, endpoint, replay, tools=_tools(options, url, server, asking, endpoint))
    if tenants:
        source = WithTenants(source=source, tenants=tenants, seed=options.seed)
    plan = Plan(
        url=url,
        bodies=Bodies(endpoint=endpoint, model=server.model, common=common_of(options)),
        source=source,
        load=load,
        manners=Manners(
            retries=options.retries,
            keyed=options.idempotency_keys,
            disconnect_share=options.disconnect,
            seed=options.seed,
        ),
        limits=Limits(connect_s=options.connect_timeout, silence_s=options.silence_timeout, total_s=options.timeout),
        stream=options.stream,
        key=key,
        ca=options.ca_file,
        objectives=options.slo,
        confidence=options.confidence,
        lag_limit=options.lag_limit,
        server=server.name,
        label=options.label,
        settings=settings,
    )
    warm_up(plan, options.warm_up)
    return replace(plan, answers=_answers(options, plan))


def _check_certificates(path: Path | None) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise FileUnusable(f"{path} has no certificates: {error.strerror or error}.") from error


def _tools(options: argparse.Namespace, url: str, server: Server, key: str | None, endpoint: Endpoint) -> bool:
    if options.workload != "agents" or endpoint != "chat" or options.tools == "off":
        return False
    return options.tools == "on" or accepts_tools(url, server.model, key, options.ca_file)


def _answers(options: argparse.Namespace, plan: Plan) -> Answers | None:
    if options.check is None:
        return None
    if options.check != "serial":
        return read_answers(Path(options.check))
    return learned(plan, options.check_requests)
