"""The engine in layout lockstep: this worker is one rank of several, each with attention and a share of the experts.

The engine steps only when all ranks step. In: steps that the batch manager plans, and the other ranks' rows for the
experts here. Out: rows for the other ranks' experts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from services.attention.step.engine import Engine
from services.attention.step.stats import Durations, EngineStats
from services.config import Settings
from services.errors import LockstepBroken, LockstepLeft
from services.fabric.faults import Faults
from services.fabric.lockstep.build import LockstepShape, lockstep_link
from services.fabric.lockstep.gloo import GlooWire, Traffic, Wire
from services.fabric.lockstep.rendezvous import Facts, Joined, Meeting, join
from services.fabric.lockstep.turns import LockstepTurns, Rows, StoreWakeUp, wait_for_peers
from services.fabric.secret import read_secret
from services.messages import GenerateRequest, TokenEvent
from services.model.experts import ExpertShard, sliced
from services.model.held_experts import check_slices
from services.model.progress import Progress
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.placement import Placement, place_experts
from services.runtime import advertised, node_name

MARGIN_S = 5.0
"""How long this rank stays beyond its drain timeout: the others begin to drain later, and publish their last tokens."""

log = logging.getLogger(__name__)


class LockstepRank:
    """One rank: its link to the others, its experts, its wake-up signal.

    ``on_notify`` is called when another rank has work; it does nothing until somebody sets it.

    Args:
        step_tokens: most tokens of a step, of which all ranks must have the same.

    Raises:
        ConfigError: experts cannot be split into so many slices.
    """

    def __init__(
        self, settings: Settings, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, step_tokens: int
    ) -> None:
        check_slices(spec, settings.expert_slices)
        self._settings, self._spec, self._dtype, self._device = settings, spec, dtype, device
        self._step_tokens = step_tokens
        self.on_notify: Callable[[], None] = lambda: None
        self.steps: LockstepTurns[Any]
        self.wake_up: StoreWakeUp
        self.traffic: Traffic
        self.faults = Faults()
        self.load_s = 0.0
        """Seconds that loading the experts took."""
        self._control: GlooWire

    def connect(self, worker: str, progress: Progress) -> LockstepTurns[Any]:
        """Load the share of experts, meet the other ranks, link up. Waits for them.

        Raises:
            StartupError: options do not fit together, or the ranks do not.
            LockstepBroken: the ranks have to start again.
        """
        placement = self._placement()
        began = time.monotonic()
        shard = self._share(placement, progress)
        self.load_s = time.monotonic() - began
        joined = join(self._meeting(), self._facts(worker), self.faults)
        shape = self._shape(joined.nodes)
        near = shape.neighbours(self._settings.rank)
        self._control = control = GlooWire(joined.group(), near=near, timeout_s=self._settings.lockstep_timeout)
        wire = self._wire(joined, control)
        link = lockstep_link(
            wire,
            shard.by_layer(),
            placement=placement,
            num_experts=self._spec.num_experts,
            shape=shape,
            max_rows=self._step_tokens,
        )
        self.traffic = wire.traffic
        self.wake_up = joined.wake_up(lambda: self.on_notify())
        layers = self._spec.moe_layers
        self.steps = LockstepTurns(link, control.agree, ranks=len(joined.nodes), layers=layers, no_rows=self._no_rows)
        log.info(
            "rank %d of %d has joined its lock-step group (%s exchange)",
            self._settings.rank,
            len(joined.nodes),
            shape.way,
        )
        return self.steps

    def wait_for_peers(self) -> None:
        """Stay, after the last request, for ranks that still drain. No other thread may step meanwhile."""
        wait_for_peers(self.steps, self.wake_up, self._settings.drain_timeout + MARGIN_S)

    def close(self) -> None:
        """End the threads that this rank has inside torch, and wait for them. No thread may step any more."""
        self.wake_up.close()
        self._control.close()

    def _placement(self) -> Placement:
        settings, spec = self._settings, self._spec
        groups = settings.workers // settings.expert_slices
        slots = settings.expert_slots or -(-spec.num_experts // max(groups, 1))
        even = {layer: [1.0] * spec.num_experts for layer in spec.moe_layers}
        return place_experts(even, groups, min(slots, spec.num_experts))

    def _share(self, placement: Placement, progress: Progress) -> ExpertShard:
        settings, spec = self._settings, self._spec
        assert settings.model is not None, "load_settings requires it of this role"
        mine = {layer: groups[settings.rank // settings.expert_slices] for layer, groups in placement.items()}
        loaded = load_experts(
            settings.model, spec, dtype=self._dtype, device=self._device, experts=mine, progress=progress
        )
        index, count = settings.rank % settings.expert_slices, settings.expert_slices
        return ExpertShard(
            {layer: sliced(whole, index, count) for layer, whole in loaded.items()},
            num_experts=spec.num_experts,
            activation=spec.expert_activation,
        )

    def _meeting(self) -> Meeting:
        settings = self._settings
        assert settings.lockstep_address is not None, "load_settings requires it"
        assert settings.fabric_secret_file is not None, "load_settings requires it"
        address, _, port = settings.lockstep_address.rpartition(":")
        return Meeting(
            rank=settings.rank,
            ranks=settings.workers,
            address=address.strip("[]"),
            port=int(port),
            host=advertised(settings),
            timeout_s=settings.lockstep_timeout,
            secret=read_secret(settings.fabric_secret_file),
        )

    def _facts(self, worker: str) -> Facts:
        settings = self._settings
        names = ("workers", "lockstep_exchange", "expert_slots", "expert_slices")
        agreed = {name: getattr(settings, name) for name in names} | {"max_num_batched_tokens": self._step_tokens}
        return Facts(
            worker=worker,
            node=node_name(settings),
            fingerprint=self._spec.fingerprint,
            weights=self._spec.weights,
            package=version("expertmesh"),
            dtype=str(self._dtype).removeprefix("torch."),
            exchange=", ".join(f"{name} {value}" for name, value in agreed.items()),
        )

    def _shape(self, nodes: tuple[str, ...]) -> LockstepShape:
        settings = self._settings
        way = settings.lockstep_exchange
        return LockstepShape(
            nodes=nodes,
            way=("hierarchical" if len(set(nodes)) > 1 else "flat") if way == "auto" else way,
            slices=settings.expert_slices,
        )

    def _wire(self, joined: Joined, control: GlooWire) -> Wire:
        if self._device.type != "cuda":
            return control
        from services.fabric.lockstep.nccl import NcclWire, nccl_group  # torch for CPUs has no NCCL

        rank, ranks, seconds = self._settings.rank, len(joined.nodes), self._settings.lockstep_timeout
        group = nccl_group(joined.store("nccl"), rank, ranks, self._device, seconds)
        return NcclWire(group, control, device=self._device, timeout_s=self._settings.lockstep_timeout)

    def _no_rows(self) -> Rows:
        spec, device = self._spec, self._device
        return (
            torch.empty(0, spec.hidden_size, dtype=self._dtype, device=device),
            torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
            torch.empty(0, spec.top_k, dtype=torch.float32, device=device),
        )


class LockstepEngine:
    """An engine that steps when any rank has work.

    Args:
        engine: its link is ``rank.steps``.
    """

    def __init__(self, engine: Engine[Any], rank: LockstepRank) -> None:
        self._engine, self.rank = engine, rank
        self._active = False
        self.suspects: dict[str, int] = {}
        """Attempts in the step in which the lock-step broke: one of them may be the cause."""
        self.has_room: Callable[[], bool] = lambda: True
        """Whether results may be made. While they may not, this rank only serves the other ranks' rows."""
        self.on_leave: Callable[[], object] = lambda: None
        """Called once, from the engine's thread, when another rank leaves and this one therefore has to."""
        rank.wake_up.listen(rank.steps.idle_turns)

    @property
    def has_work(self) -> bool:
        steps = self.rank.steps
        notified = self.rank.wake_up.notified(steps.idle_turns)
        return self._active or self._wants_step or steps.unannounced or notified

    def leave(self) -> None:
        """Announce, from any thread, that no more requests come. The next step, which needs a nudge, passes it on."""
        self.rank.steps.leaving = True

    def add(self, request: GenerateRequest) -> None:
        self._engine.add(request)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._engine.cancel(request_id, attempt)

    def held(self) -> dict[str, int]:
        return self._engine.held()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def take_durations(self) -> Durations:
        return self._engine.take_durations()

    def exemplar(self) -> dict[str, str] | None:
        return self._engine.exemplar()

    def step(self) -> list[TokenEvent]:
        """Take one turn of all ranks, or agree that there is nothing to do.

        Raises:
            LockstepBroken: a rank is gone; this one cannot go on either.
        """
        steps, wake_up = self.rank.steps, self.rank.wake_up
        if not self._active and (self._wants_step or steps.unannounced):
            wake_up.notify(steps.idle_turns)
        before = steps.turns
        events = self._engine_step() if self._wants_step else []
        with torch.inference_mode():
            steps.finish()
            self._active = steps.turns > before or steps.begin(work=False)
            steps.finish()
        if not self._active:
            wake_up.listen(steps.idle_turns)
        if steps.some_leave and not steps.leaving:
            steps.leaving = True
            self.on_leave()
        return events

    def _engine_step(self) -> list[TokenEvent]:
        try:
            return self._engine.step()
        except LockstepBroken:
            self.suspects = self._engine.in_step()
            raise

    @property
    def _wants_step(self) -> bool:
        return self._engine.has_work and self.has_room()


class Departure:
    """Lets a rank end when it has to or when another rank leaves. Create it in the event loop, before the first step.

    Args:
        stop: set when this rank is to end.
        nudge: wakes the thread in which ``engine`` steps.
    """

    def __init__(self, engine: LockstepEngine, stop: asyncio.Event, nudge: Callable[[], None]) -> None:
        self._engine, self._stop, self._nudge = engine, stop, nudge
        self.begun = asyncio.Event()
        engine.on_leave = partial(asyncio.get_running_loop().call_soon_threadsafe, self.begun.set)

    async def follow(self) -> None:
        """Return once this rank is to end and has announced that to the others."""
        await self._stop.wait()
        self._engine.leave()
        self._nudge()
        self.begun.set()

    async def end(self) -> None:
        """Wait for ranks that still drain. Raises LockstepLeft if this rank was not stopped: it has to start again."""
        await asyncio.to_thread(self._engine.rank.wait_for_peers)
        if not self._stop.is_set():
            raise LockstepLeft("Another rank has left; this one restarts to join the next group.")
