"""ExpertLink inside a node: a decode step's rows go to experts by memory that both sides map, the rest over tcp.

Before each step the link looks which groups have a seat that shares memory. Rows of the other groups (cold experts on
CPU workers, seats of other nodes), and of steps with more rows than the memory holds, take the TcpLink inside.
Legend: T rows, D hidden size, K experts chosen per row, E experts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_kernels.exchange.layout import ABORTED, ANSWERS, BASE, DEADLINE, FAILED, INBOX, MAX_GROUPS, Layout
from moe_kernels.exchange.op import send_rows, sum_answers
from services.errors import ExpertUnavailable
from services.fabric.device_counters import Counters
from services.fabric.shared_memory.control_block import ControlBlock
from services.fabric.shared_memory.memory import PeerMemory
from services.fabric.shared_memory.messages import Step, bucket_of, buckets
from services.fabric.shared_memory.peers import SharedPeers, SharedSeat
from services.fabric.shared_memory.step_choice import seat_for
from services.fabric.tcp.extension import ClientExtension
from services.fabric.tcp.link import TcpHandle, TcpLink
from services.routing import RoutingTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryOptions:
    """Timeouts, in seconds, and the sharing of GPUs.

    Args:
        deadline_s: longest wait for one exchange.
        colocated_s: the same where a seat shares its GPU with attention, if this is longer.
        quarantine_s: how long a seat that missed a deadline gets no rows through shared memory.
        unavailable_s: how long a failed step may be run again and again.
        shared_gpu: seats compute on this link's GPU, see :func:`moe_kernels.exchange.op.sum_answers`.
    """

    deadline_s: float = 0.02
    colocated_s: float = 0.0
    quarantine_s: float = 1.0
    unavailable_s: float = 10.0
    shared_gpu: bool = False


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """A dispatch in flight; ``tcp`` has the rows of groups without shared memory."""

    layer: int
    exchange: int
    micro_batch: int
    ids_TK: Tensor
    weights_TK: Tensor
    tcp: TcpHandle | None


@dataclass(slots=True)
class _Step:
    """The choice for the running step: ``seats`` by group. Rows of other groups go over tcp unless it is ``complete``.

    ``free`` lists the micro-batches without a handle in flight, ascending.
    """

    bucket: int = 0
    micro_batches: int = 1
    seats: dict[int, SharedSeat] = field(default_factory=dict)
    complete: bool = False
    epoch: int = 0
    free: list[int] = field(default_factory=list)

    @property
    def shares(self) -> bool:
        return self.complete or bool(self.seats)


OpenTcp = Callable[[ClientExtension], TcpLink]


class SharedMemoryLink:
    """Serves one engine. One thread makes steps; :meth:`apply` and the methods that only read may be called by any.

    Args:
        open_tcp: makes the TcpLink inside, with the extension that it is given.
        table: the routing table to start with.
        layers: the layers with experts, in the order of the model.
        layout: where rows and answers lie; a micro-batch of more than ``layout.rows`` rows goes over tcp.
        node: name of this machine, as seats give theirs.
    """

    def __init__(
        self,
        open_tcp: OpenTcp,
        table: RoutingTable,
        *,
        memory: PeerMemory,
        device: torch.device,
        layers: Sequence[int],
        layout: Layout,
        node: str,
        options: SharedMemoryOptions | None = None,
    ) -> None:
        self._options = options or SharedMemoryOptions()
        self._layout, self._device, self._memory = layout, device, memory
        self._order = {layer: at for at, layer in enumerate(layers)}
        self._control = ControlBlock(device)
        self._group_of_LE = torch.full((len(layers), table.num_experts), -1, dtype=torch.int32, device=device)
        self._counts_LE = torch.zeros(len(layers), table.num_experts, dtype=torch.int64, device=device)
        self._counters = Counters()
        self._over_tcp_LE = torch.ones(len(layers), table.num_experts, dtype=torch.bool, device=device)
        self._lock = threading.Lock()
        self._table = self._next_table = table
        self._slow_until: dict[SharedSeat, float] = {}
        self._base = 0
        self._failing_since: float | None = None
        self._step = _Step(epoch=table.epoch)
        self._under_way = False
        self.shared_steps = 0
        """Finished steps that had rows in shared memory."""
        self.repeated_steps = 0
        self.peers = SharedPeers(memory, layout, node=node, on_lost=self._on_lost)
        self.tcp = open_tcp(self.peers)
        self._set_groups(table)
        self._compile()

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        """Choose a seat of shared memory for each group that has one, and start the step there. Never waits.

        Args:
            rows: rows of each micro-batch; with () the whole step goes over tcp.
        """
        assert not self._under_way, "finish_step() ends a step"
        self.tcp.begin_step(step, rows)
        self._follow_table()
        self._step = chosen = self._choose(rows)
        self.peers.use(frozenset(chosen.seats.values()))
        self._under_way = True
        words = {BASE: self._base, DEADLINE: int(self._deadline_s(chosen) * 1e9)}
        for group, seat in chosen.seats.items():
            assert seat.inbox is not None
            words[INBOX + self._numbers[group]] = seat.inbox.address
            words[ANSWERS + self._numbers[group]] = seat.answers.bytes.data_ptr()
        self._control.write(words)
        self._over_tcp(chosen)
        message = Step(
            epoch=chosen.epoch, step=step, base=self._base, bucket=max(1, chosen.bucket),
            micro_batches=chosen.micro_batches, deadline_s=self._deadline_s(chosen), whole=chosen.complete,
        )  # fmt: skip
        for seat in set(chosen.seats.values()):
            seat.start(message)
        if any(seat.lost for seat in chosen.seats.values()):  # before `peers` knew that this step uses it
            self._control.abort()
        self._base += len(self._order) * chosen.micro_batches

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> SharedMemoryHandle:
        """Dispatch as :class:`services.fabric.link.ExpertLink` says, between ``begin_step`` and ``finish_step``."""
        chosen, at = self._step, self._order[layer]
        micro_batch = chosen.free.pop(0) if chosen.shares else 0
        exchange = at * chosen.micro_batches + micro_batch
        if chosen.shares:
            assert x_TD.shape[0] <= chosen.bucket, "more rows than the step was begun with"
            send_rows(
                x_TD, expert_ids_TK, weights_TK, self._group_of_LE[at], self._counts_LE[at], self._control.words,
                layout=self._layout, groups=len(self._numbers), bucket=chosen.bucket, exchange=exchange,
                micro_batch=micro_batch,
            )  # fmt: skip
        tcp = None
        if not chosen.complete:
            ids_TK = expert_ids_TK
            if chosen.seats:
                over_tcp_TK = self._over_tcp_LE[at][expert_ids_TK.clamp(min=0)]
                ids_TK = torch.where(over_tcp_TK & (expert_ids_TK >= 0), expert_ids_TK, -1)
            tcp = self.tcp.dispatch(layer, x_TD, ids_TK, weights_TK)
        return SharedMemoryHandle(layer, exchange, micro_batch, expert_ids_TK, weights_TK, tcp)

    def combine(self, handle: SharedMemoryHandle) -> Tensor:
        """Combine as :class:`services.fabric.link.ExpertLink` says.

        The sum holds zeros where :meth:`finish_step` will return False.
        """
        chosen = self._step
        y_TD = None if handle.tcp is None else self.tcp.combine(handle.tcp)
        if not chosen.shares:
            assert y_TD is not None
            return y_TD
        chosen.free = sorted([*chosen.free, handle.micro_batch])
        shared_TD = sum_answers(
            handle.ids_TK, handle.weights_TK, self._group_of_LE[self._order[handle.layer]], self._control.words,
            layout=self._layout, groups=len(self._numbers), bucket=chosen.bucket, exchange=handle.exchange,
            micro_batch=handle.micro_batch, shared_gpu=self._options.shared_gpu,
        )  # fmt: skip
        return shared_TD if y_TD is None else shared_TD + y_TD

    def graph_key(self) -> Hashable | None:
        """Return a key that changes with the number of groups; seats and addresses are words that the graph reads."""
        return self._key(self._step.bucket) if self._step.complete else None

    @contextmanager
    def capture_context(self, rows: int) -> Iterator[Hashable | None]:
        """Let exchanges be captured: kernels inside find the step aborted, so that they neither send nor wait."""
        assert not self._under_way, "finish_step() ends a step"
        self._follow_table()
        if rows > self._layout.rows or len(self._table.groups) > MAX_GROUPS:
            yield None
            return
        bucket = bucket_of(rows, self._layout.rows)
        self._control.write({FAILED: ABORTED})
        self._step = _Step(bucket=bucket, complete=True, epoch=self._table.epoch, free=[0])
        try:
            yield self._key(bucket)
        finally:
            self._step = _Step(epoch=self._table.epoch)

    def finish_step(self) -> bool:
        """Return whether all exchanges of the step were answered; if not, begin the step again with the same rows.

        Waits for the device. Seats that missed a deadline get rows over tcp for ``quarantine_s``; lost seats get none.

        Raises:
            ExpertUnavailable: every step has failed for ``unavailable_s``.
        """
        chosen, failed = self._step, 0
        if chosen.seats:
            failed = self._control.failed()
        self.peers.use(frozenset())
        self._under_way = False
        if not failed:
            self._failing_since = None
            self.shared_steps += bool(chosen.seats)
            return True
        self.repeated_steps += 1
        self._recover(chosen, failed)
        return False

    def apply(self, table: RoutingTable) -> None:
        """Use ``table`` from the next step on, over tcp from the next dispatch on, unless a newer table is known."""
        self.tcp.apply(table)
        with self._lock:
            if table.epoch > self._next_table.epoch:
                self._next_table = table

    def oldest_epoch(self) -> int:
        """Return :meth:`TcpLink.oldest_epoch`, which counts a seat as busy while the running step uses its memory."""
        return self.tcp.oldest_epoch()

    def missing(self) -> tuple[int, ...]:
        """Return :meth:`TcpLink.missing`."""
        return self.tcp.missing()

    def wait_ready(self, seconds: float) -> bool:
        """Return :meth:`TcpLink.wait_ready`."""
        return self.tcp.wait_ready(seconds)

    def wait_shared(self, seconds: float) -> bool:
        """Return whether every group had a seat of shared memory at some moment within ``seconds``, between steps."""
        groups = self._numbers.keys()
        return self.peers.wait_for(lambda seats: groups <= {seat.link.seat.group for seat in seats}, seconds)

    def expert_rows(self) -> dict[int, list[int]]:
        """Return layer -> pairs by expert since the start; a step that is run again counts again."""
        here, tcp = self._counters.read(self._counts_LE), self.tcp.expert_rows()
        return {
            layer: [one + other for one, other in zip(here[at], tcp[layer], strict=True)]
            for layer, at in self._order.items()
        }

    def stalled_s(self) -> dict[int, float]:
        """Return :meth:`TcpLink.stalled_s` of rows over tcp: the host does not see what a device waits for."""
        return self.tcp.stalled_s()

    @property
    def transport(self) -> str:
        """What carries the rows of the step: that of TCP as soon as any rows take it."""
        return "shared_memory" if self._step.complete else self.tcp.transport

    def exchanged_bytes(self) -> dict[tuple[str, str], int]:
        """Return :meth:`TcpLink.exchanged_bytes`: shared memory takes no bytes over a connection."""
        return self.tcp.exchanged_bytes()

    def resent_rows(self) -> dict[str, int]:
        """Return :meth:`TcpLink.resent_rows`; a step through shared memory is repeated as a whole."""
        return self.tcp.resent_rows()

    def trace(self, context: bytes) -> None:
        """Send ``context`` along with the rows that go over tcp; those in shared memory have no room for it."""
        self.tcp.trace(context)

    def faults(self) -> dict[str, int]:
        """Return :meth:`TcpLink.faults`."""
        return self.tcp.faults()

    def shared(self) -> Mapping[int, int]:
        """Return group -> number of the seat whose memory the last step used."""
        return {group: seat.link.seat.number for group, seat in self._step.seats.items()}

    def shared_seats(self) -> int:
        """Return how many seats share memory with this worker now."""
        return len(self.peers.usable())

    def close(self) -> None:
        """End the running step, all connections and all shared memory."""
        self._control.abort()
        self.tcp.close()
        self.peers.close()
        self._memory.close()

    def _deadline_s(self, chosen: _Step) -> float:
        colocated_s = self._options.colocated_s if any(seat.colocated for seat in chosen.seats.values()) else 0.0
        return max(self._options.deadline_s, colocated_s)

    def _key(self, bucket: int) -> Hashable:
        return "shared memory", bucket, len(self._numbers)

    def _choose(self, rows: Sequence[int]) -> _Step:
        largest = max(rows, default=0)
        if not 1 <= largest <= self._layout.rows or len(rows) > self._layout.micro_batches:
            return _Step(epoch=self._table.epoch)
        now = time.monotonic()
        usable = [seat for seat in self.peers.usable() if seat.link.usable]
        self._slow_until = {seat: until for seat, until in self._slow_until.items() if until > now and seat in usable}
        seats = {}
        for group in self._numbers:
            of_group = [seat for seat in usable if seat.link.seat.group == group]
            prompt = [seat for seat in of_group if seat not in self._slow_until]  # tcp waits longer for slow seats
            if prompt:
                own = [seat for seat in prompt if seat.inbox and seat.inbox.own]  # no row crosses the link
                seats[group] = own[0] if own else seat_for(prompt)
        return _Step(
            bucket=bucket_of(largest, self._layout.rows),
            micro_batches=len(rows),
            seats=seats,
            complete=len(seats) == len(self._table.groups),
            epoch=self._table.epoch,
            free=list(range(len(rows))),
        )

    def _recover(self, chosen: _Step, failed: int) -> None:
        """Stop the failed step at all its seats, and quarantine slow ones: late seats whose connection is up.

        A seat that the next step does not use would otherwise wait for rows until its own timeout.
        """
        for seat in set(chosen.seats.values()):
            seat.stop()
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now > self._failing_since + self._options.unavailable_s:
            raise ExpertUnavailable(
                f"A step was repeated for {self._options.unavailable_s:g} s without finishing in time.",
                hint="Try again when the expert workers are less busy.",
                retry_after_s=self._options.unavailable_s,
            )
        until = now + self._options.quarantine_s
        for group, seat in chosen.seats.items():
            if seat.lost:
                log.warning("lost %s during a step; running the step again", seat.link.name)
            elif failed & (1 << self._numbers[group]):
                self._slow_until[seat] = until
                log.warning("%s missed a step's deadline; running the step again", seat.link.name)

    def _on_lost(self, _seat: SharedSeat) -> None:
        self._control.abort()

    def _follow_table(self) -> None:
        with self._lock:
            table = self._next_table
        if table is not self._table:
            self._table = table
            self._set_groups(table)

    def _set_groups(self, table: RoutingTable) -> None:
        """Number the groups from 0; rows of groups past ``MAX_GROUPS`` go over tcp."""
        self._numbers = {group.number: at for at, group in enumerate(table.groups[:MAX_GROUPS])}
        rows = [[self._numbers.get(group, -1) for group in table.group_of[layer]] for layer in self._order]
        self._group_of_LE.copy_(torch.tensor(rows, dtype=torch.int32))

    def _compile(self) -> None:
        """Compile the kernels for every bucket: in a step that would take longer than seats wait for rows."""
        layout = self._layout
        self._control.write({FAILED: ABORTED})
        for bucket in buckets(layout.rows):
            x_TD = torch.zeros(bucket, layout.hidden, dtype=layout.dtype, device=self._device)
            ids_TK = torch.full((bucket, layout.slots), -1, device=self._device)
            weights_TK = torch.zeros(ids_TK.shape, device=self._device)
            at: dict[str, Any] = {"layout": layout, "groups": 1, "bucket": bucket, "exchange": 0, "micro_batch": 0}
            groups_E, words = self._group_of_LE[0], self._control.words
            send_rows(x_TD, ids_TK, weights_TK, groups_E, self._counts_LE[0], words, **at)
            sum_answers(ids_TK, weights_TK, groups_E, words, **at, shared_gpu=self._options.shared_gpu)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _over_tcp(self, chosen: _Step) -> None:
        if chosen.seats and not chosen.complete:
            shared = [at for group, at in self._numbers.items() if group in chosen.seats]
            taken = torch.tensor(shared, dtype=torch.int32, device=self._device)
            self._over_tcp_LE.copy_(~torch.isin(self._group_of_LE, taken))
