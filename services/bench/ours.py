"""This project's engine in this process, without a server: built as an attention worker builds it."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from services.attention.setup.build import Built, build
from services.attention.step.engine import Engine
from services.bench.loop import Step, greedy, run
from services.bench.report import version_here
from services.bench.sides import OURS, Batch, Limits, Timed
from services.config import Settings
from services.model.weight_source import WeightSource


@dataclass(slots=True)
class OurEngine:
    """``count`` numbers the requests."""

    built: Built[Engine[Any]] | None
    count: int = 0

    @property
    def name(self) -> str:
        return OURS

    @property
    def device(self) -> torch.device:
        return self._built().served.device

    @property
    def limits(self) -> Limits:
        plan = self._built().plan
        return Limits(
            max_num_seqs=plan.size.max_num_seqs,
            max_model_len=plan.room.max_model_len,
            kv_tokens=plan.room.kv_tokens,
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        built = self._built()
        size, room = built.plan.size, built.plan.room
        return {
            "version": version_here(),
            "device": device_name(built.served.device),
            "dtype": str(built.served.dtype).removeprefix("torch."),
            "experts": built.served.spec.experts.title,
            "max_num_seqs": size.max_num_seqs,
            "max_num_batched_tokens": size.max_num_batched_tokens,
            "max_model_len": room.max_model_len,
            "kv_blocks": room.kv_blocks,
            "cuda_graphs": built.engine.stats().graphs,
            "threads": torch.get_num_threads(),
            **versions(),
        }

    def run(self, batch: Batch, on_finished: Callable[[int], None]) -> Timed:
        requests = []
        for prompt, answer in zip(batch.prompts, batch.answers, strict=True):
            self.count += 1
            requests.append(greedy(f"request {self.count}", prompt, answer))
        ended: list[float] = []

        def note(step: Step) -> None:
            done = sum(event.finish is not None for event in step.events)
            ended.extend([step.ended_s] * done)
            if done:
                on_finished(len(ended))

        began = time.perf_counter()
        found = run(self._built().engine, requests, on_step=note, sync=self._sync)
        return Timed(
            seconds=found.seconds,
            tokens=[found.tokens[request.id] for request in requests],
            decode_s=[step.seconds for step in found.steps if not step.prompt_tokens and step.rows == len(requests)],
            finished_s=[at - began for at in ended],
            preemptions=found.preemptions,
        )

    def close(self) -> None:
        cuda = self.device.type == "cuda"
        self.built = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    def _built(self) -> Built[Engine[Any]]:
        assert self.built is not None, "it is closed"
        return self.built

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def start(settings: Settings, weights: WeightSource) -> OurEngine:
    """Returns the engine with its weights loaded and its kernels warm.

    Raises:
        StartupError: it cannot be built; see :func:`services.attention.setup.build.build`.
    """
    built = build(settings, lambda: 0, worker="bench", weights=weights)
    built.engine.prepare()
    if built.engine.on_gpu:
        built.engine.warm_up()
    return OurEngine(built)


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def versions() -> dict[str, str]:
    """Returns the versions of what computes."""
    found = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):  # torch for CPUs brings none
        found["triton"] = version("triton")
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
