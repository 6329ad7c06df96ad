"""Steps of several clients of a seat that began at about the same time, as one: weights are read once for all of them.

Each layer waits for all members' rows, so they go at the pace of the slowest; who stops or is gone is left out from
there on. Legend: C rows of a joined call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.exchange.joined.op import send_joined, take_joined
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import (
    DEADLINE,
    LATE,
    MEMBER_ANSWERS,
    MEMBER_BASE,
    MEMBER_GONE,
    MEMBER_INBOX,
    MEMBER_LAST,
    MEMBER_OUT,
    MEMBER_ROWS,
    PATIENCE,
    Layout,
    member_word,
)
from services.fabric.shared_memory.busy_time import Watch
from services.fabric.shared_memory.control_block import ControlBlock
from services.fabric.shared_memory.messages import Step, buckets
from services.fabric.shared_memory.steps import Shape, computed, prepared
from services.fabric.tcp.compute import Compute


class JointStepBody:
    """A :class:`services.fabric.shared_memory.steps.Body` for calls of up to ``rows`` rows of up to ``members``
    clients.
    """

    def __init__(
        self,
        compute: Compute,
        layers: Sequence[int],
        counts_LE: Tensor,
        layout: Layout,
        *,
        members: int,
        rows: int,
    ) -> None:
        self._compute, self._layers, self._counts_LE = compute, list(layers), counts_LE
        self._layout, self.members, self._rows = layout, members, rows
        self.control = ControlBlock(counts_LE.device)
        self.watch: Watch | None = None
        self._joined = Joined.room(rows, layout, counts_LE.device)

    @property
    def shapes(self) -> Iterator[Shape]:
        for bucket in buckets(self._layout.rows):
            if bucket * self.members <= self._rows:
                yield Shape(bucket, members=self.members)

    @property
    def layers(self) -> int:
        return len(self._layers)

    def run(self, shape: Shape) -> None:
        with torch.inference_mode():
            for exchange in range(self.layers):
                self._exchange(shape.bucket, exchange)

    def _exchange(self, bucket: int, at: int) -> None:
        """One micro-batch: the exchange of a layer has the layer's number."""
        joined, layout, words = self._joined.of(bucket * self.members), self._layout, self.control.words
        take_joined(joined, words, layout=layout, members=self.members, bucket=bucket, exchange=at)
        with self.watch.around(at) if self.watch else nullcontext():
            parts = joined.x_CD, joined.taken_CK, joined.weights_CK
            send_joined(
                computed(self._compute, self._layers[at], layout, *parts),
                joined,
                self._counts_LE[at],
                words,
                layout=layout,
                members=self.members,
                bucket=bucket,
                exchange=at,
            )


class Client(Protocol):
    """An attention worker at a seat."""

    @property
    def place(self) -> int:
        """Its number among the clients."""
        ...

    @property
    def layout(self) -> Layout:
        """Of the memory that it shares."""
        ...

    @property
    def inbox(self) -> int:
        """Its address."""
        ...

    @property
    def answers_at(self) -> int: ...

    def begin(self, step: Step, wait_s: float) -> None:
        """Start its own steps, alone."""
        ...

    def idle(self) -> bool:
        """Whether its own steps have ended."""
        ...


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that has come and is to begin."""

    client: Client
    step: Step


class JointStep:
    """Steps of several clients with memory of one layout. One at a time.

    For one thread at a time, all methods.

    Args:
        wait_s: how long a started step waits for rows of anybody.
    """

    def __init__(self, body: JointStepBody, *, wait_s: float) -> None:
        self._body, self._wait_s = body, wait_s
        self._shapes = frozenset(body.shapes)
        self._now: list[Client | None] = []
        self._steps = prepared(body)

    @property
    def members(self) -> int:
        """That it has room for."""
        return self._body.members

    @property
    def seconds(self) -> float:
        return self._steps.seconds

    def idle(self) -> bool:
        return self._steps.idle()

    def fits(self, steps: Sequence[PendingStep]) -> bool:
        """Whether they can begin together, now."""
        bucket = max(joining.step.bucket for joining in steps)
        free = self.idle() and all(joining.client.idle() for joining in steps)
        return free and len(steps) <= self.members and self._shape(bucket) in self._shapes

    def start(self, steps: Sequence[PendingStep], patience_s: float) -> None:
        """``patience_s``: how long the others wait in a layer for one that is late (it lives: who is gone is told)."""
        self._now = [joining.client for joining in steps]
        words = {DEADLINE: int(self._wait_s * 1e9), PATIENCE: int(patience_s * 1e9)}
        for number, joining in enumerate(steps):
            client, step = joining.client, joining.step
            words |= {
                member_word(number, MEMBER_INBOX): client.inbox,
                member_word(number, MEMBER_ANSWERS): client.answers_at,
                member_word(number, MEMBER_BASE): step.base,
                member_word(number, MEMBER_LAST): step.base + self._body.layers,
                member_word(number, MEMBER_ROWS): step.bucket,
            }
        self._steps.start(self._shape(max(joining.step.bucket for joining in steps)), words)

    def leave_out(self, client: Client) -> None:
        """Of the step under way, from the next call on. Does not wait for that."""
        if client in self._now and not self.idle():
            self._body.control.raise_flag(member_word(self._now.index(client), MEMBER_GONE))

    def was_late(self, client: Client) -> bool:
        """Whether the others' patience with it ended, in the joint step's last step."""
        return client in self._now and self._body.control.told(member_word(self._now.index(client), MEMBER_OUT)) == LATE

    def part(self, client: Client, pause: Callable[[], object]) -> bool:
        """Leave ``client`` out of the step under way; whether nothing uses its memory any more, which takes as long as
        a call of a layer. ``pause`` is called between looks; another step may begin meanwhile."""
        now = self._now
        if client not in now:
            return True
        number = now.index(client)
        self.leave_out(client)
        until = time.monotonic() + self._wait_s
        while self._now is now and not self.idle() and not self._body.control.told(member_word(number, MEMBER_OUT)):
            if time.monotonic() > until:
                return False
            pause()
        now[number] = None
        return True

    def close(self) -> None:
        """What still computes ends by itself."""
        if self.idle():
            self._steps.close()
        else:
            self._steps.give_up()

    def _shape(self, bucket: int) -> Shape:
        return Shape(bucket, members=self.members)
