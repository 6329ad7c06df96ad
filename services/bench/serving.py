"""From the options of `bench serve` to servers and the words of the load that all of them get."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.workload.lengths import EXPERT_FLOW_REQUESTS, LENGTHS
from services.bench.latency import check_length
from services.bench.options import Given
from services.bench.prepare import check_model
from services.bench.report import version_here
from services.bench.serve import Target, ours, theirs
from services.bench.sides import OURS, VLLM
from services.bench.vllm import engine_arguments, find
from services.config import Settings
from services.errors import ConfigError
from services.model.families import spec_from_config
from services.model.hub import config_folder
from services.model.spec import ModelSpec

_USUAL_IDS = 1000
"""The load generator's token ids are below, if the model has so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Servers to measure one after the other, and the ``load`` for `expertmesh-load run`. ``facts``: of each side."""

    targets: Sequence[Target]
    load: Sequence[str]
    facts: Mapping[str, Mapping[str, Any]]


def prepare(given: Given) -> Serving:
    """Looks for all that is needed before a server is started.

    Raises:
        ExpertMeshError: something is not there, or cannot be done.
    """
    own = given.own
    if own.max_concurrency is not None and math.isfinite(own.request_rate):
        raise ConfigError(
            "--request-rate sends at times of its own, and clients of --max-concurrency wait for answers.",
            hint="Give one of them.",
        )
    vllm = find(own.vllm, own.vllm_options) if own.against else None
    if own.url is not None:
        if vllm is not None:
            raise ConfigError(
                "--against vllm needs the model, and --url does not say where that is.", hint="Give MODEL, not --url."
            )
        target = Target(side=OURS, url=own.url.rstrip("/").removesuffix("/v1"))
        return Serving(targets=[target], load=_load(given, own.served_model, None), facts={OURS: {}})
    check_model(given.settings)
    spec = _spec(given.settings)
    settings = given.settings
    check_length(_longest(given), min(settings.max_model_len or spec.max_position, spec.max_position))
    name, facts = settings.model_name, {OURS: {"version": version_here(), **_batches(given.words)}}
    targets = [ours(_our_words(given), _free_port(settings))]
    if vllm is not None:
        more = _their_words(given)
        targets.append(theirs(vllm, str(settings.model), name, _free_port(None), more))
        facts[VLLM] = {"version": vllm.version, **_batches([*more, *vllm.options])}
    return Serving(targets=targets, load=_load(given, name, spec), facts=facts)


def _batches(words: Sequence[str]) -> dict[str, Any]:
    """Returns how much a step of a server takes, as far as its options say it."""
    given = engine_arguments(words)
    return {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in given}


def _spec(settings: Settings) -> ModelSpec:
    folder = config_folder(settings)
    assert folder is not None
    return spec_from_config(folder)


def _longest(given: Given) -> int:
    """Returns the tokens of the longest request that is sure to come; 0 where a file or a conversation says it."""
    own = given.own
    if own.dataset_path is not None or own.workload in ("chat", "agents"):
        return 0
    usual = LENGTHS[own.workload]
    return (own.input_len or usual[0]).most + (own.output_len or usual[1]).most


def _our_words(given: Given) -> list[str]:
    """Returns the options of `serve`: those given, a quiet log, and a queue that takes the whole load at once."""
    words, named = [], set(given.words)
    port = _port_words(given)
    words += [word for at, word in enumerate(given.words) if at not in port]
    if "--log-level" not in named:
        words += ["--log-level", "warning"]
    if "--max-queued-requests" not in named:
        words += ["--max-queued-requests", str(max(given.settings.max_queued_requests, _requests(given)))]
    return words


def _port_words(given: Given) -> set[int]:
    """Returns the places of --port and its value among the words: it comes last, as the bench chose it."""
    return {at + more for at, word in enumerate(given.words) if word == "--port" for more in (0, 1)}


def _their_words(given: Given) -> list[str]:
    """Returns the options of `vllm serve` that mean the same as those given to our server."""
    settings = given.settings
    asked = {
        "--dtype": None if settings.dtype == "auto" else settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--revision": settings.revision,
    }
    words = [word for name, value in asked.items() if value is not None for word in (name, str(value))]
    words.append("--enable-prefix-caching" if settings.prefix_cache else "--no-enable-prefix-caching")
    return [*words, *(["--enforce-eager"] if settings.enforce_eager else [])]


def _free_port(settings: Settings | None) -> int:
    if settings is not None and settings.port != Settings.model_fields["port"].default:
        return settings.port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _requests(given: Given) -> int:
    return given.own.num_prompts or EXPERT_FLOW_REQUESTS


def _load(given: Given, model: str | None, spec: ModelSpec | None) -> list[str]:
    """Returns the words of `expertmesh-load run` after its URL."""
    own = given.own
    words = ["--seed", str(own.seed), "--warm-up", str(own.num_warmups), "--requests", str(_requests(given))]
    if model is not None:
        words += ["--model", model]
    if own.max_concurrency is not None:
        words += ["--concurrency", str(own.max_concurrency)]
    else:
        words += ["--rate", "inf" if math.isinf(own.request_rate) else f"{own.request_rate:g}"]
    words += ["--prompts", str(own.dataset_path)] if own.dataset_path else ["--workload", own.workload]
    for option, lengths in (("--prompt-tokens", own.input_len), ("--output-tokens", own.output_len)):
        if lengths is not None:
            words += [option, f"{lengths.least}..{lengths.most}"]
    if spec is not None:
        words += ["--vocabulary", str(max(12, min(_USUAL_IDS, spec.vocab_size)))]
    return [*words, *(word for objective in own.goodput for word in ("--slo", objective))]
