"""A whole deployment, one process per role as a user starts it: on hosts that are namespaces, or on this one."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import redis

from testkit.processes.cable import Cable
from testkit.processes.earlier import options_of_earlier
from testkit.processes.netns import open_network
from testkit.processes.servers import Bench, Proc, Server, bench, flags, free_port, is_ready, metric_sum
from testkit.waiting import until

REDIS_PORT, READY_S = 6379, 300.0
TIMEOUT_S = 30.0
"""How long a step waits for a group without workers: a busy machine may take a minute to start one."""


class Place(Protocol):
    """Where a process runs. ``testkit.processes.netns.Host`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    def command(self, args: Sequence[str]) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """This machine itself: nothing to cut."""

    name: str
    address: str = "127.0.0.1"

    def command(self, args: Sequence[str]) -> list[str]:
        return list(args)


@contextlib.contextmanager
def places(network: bool) -> Iterator[Callable[[str], Place]]:
    """Makes a place by its name: a host of its own with ``network``."""
    if not network:
        yield lambda name: Here(name=name)
        return
    with open_network() as switch:
        yield switch.host


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How many of each, and how long a silent one is believed, in seconds."""

    attention: int = 2
    experts: int = 3
    groups: int = 2
    colocated: int = 0
    """Attention workers with a seat of their own, besides."""
    schedulers: int = 2
    gateways: int = 1
    lease_s: float = 3.0


@dataclass(kw_only=True, slots=True)
class Member:
    """One place of the deployment and the process that is there now."""

    name: str
    role: str
    place: Place
    options: dict[str, object]
    proc: Proc | None = None
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def running(self) -> Proc:
        """The process, once there is one."""
        assert self.proc is not None, self.name
        return self.proc

    @property
    def alive(self) -> bool:
        return self.proc is not None and self.proc.popen.poll() is None

    @property
    def cable(self) -> Cable | None:
        return getattr(self.place, "cable", None)


@contextlib.contextmanager
def deployed(model: Path, shape: Shape, folder: Path | None = None, *, network: bool = False) -> Iterator[Cluster]:
    """A :class:`Cluster` that is whole. Its logs are kept in ``folder``, or go with the block."""
    with contextlib.ExitStack() as stack:
        logs = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertmesh-deployed-")))
        logs.mkdir(parents=True, exist_ok=True)
        place = stack.enter_context(places(network))
        cluster = Cluster(stack.enter_context(bench(logs.resolve())), place, model, shape)
        cluster.start()
        yield cluster


class Cluster:
    """redis, gateway (others: ``gateway-1``), schedulers, attention and expert workers by name: ``experts-0``."""

    def __init__(
        self,
        stage: Bench,
        place: Callable[[str], Place],
        model: Path,
        shape: Shape,
        special: Callable[[str], Mapping[str, object]] = lambda _name: {},
    ) -> None:
        """``special``: options that the process of that name gets besides the usual ones."""
        self.stage, self.shape, self._special = stage, shape, special
        self.trees: dict[str, Path] = {}
        """Folders with the source of members that are not run from this one, by name."""
        self._model = model
        self._secret = stage.folder / "fabric.secret"
        self._secret.write_text(secrets.token_hex(16))
        self._data = tempfile.mkdtemp(prefix="redis-", dir=stage.folder)  # an earlier run may have had the same folder
        self.members = {name: self._member(name, place(name)) for name in self._names()}
        self.redis_port = free_port() if isinstance(self.members["redis"].place, Here) else REDIS_PORT

    def start(self) -> None:
        """Returns when every worker is there and every expert has its seat."""
        for name in self.members:
            self.start_one(name)
        for server in self.servers:
            until(server.ready, "the gateway is ready", limit_s=READY_S, every_s=0.1)
        self.wait_whole()

    def reserve(self, name: str, place: Place) -> None:
        """Make a place for one member more, which :meth:`start_one` fills."""
        self.members[name] = self._member(name, place)

    def start_one(self, name: str) -> None:
        """Start, or start again with the same options."""
        member = self.members[name]
        if member.role == "redis":
            options, place = ("--protected-mode", "no"), member.place
            member.proc = self.stage.redis(
                *options, port=self.redis_port, address=place.address, data=self._data, within=place.command
            )
            return
        own = options_of_earlier(member.options) if name in self.trees else member.options
        options = flags(**own, redis_url=self.redis_url, supervisor_pid=os.getpid())
        command = [*self._source(name), sys.executable, "-m", "services", member.role, *options]
        member.proc = self.stage.start(name, member.place.command(command))

    def _source(self, name: str) -> list[str]:
        tree = self.trees.get(name)
        return ["env", "-C", str(tree), f"PYTHONPATH={tree}:{tree / 'kernels'}"] if tree else []

    @property
    def redis_url(self) -> str:
        return f"redis://{self.members['redis'].place.address}:{self.redis_port}/0"

    @property
    def server(self) -> Server:
        return self.servers[0]

    @property
    def servers(self) -> list[Server]:
        """The gateways."""
        found = []
        for gateway in map(self.members.__getitem__, self.of("gateway")):
            url = f"http://{gateway.place.address}:{gateway.ports['port']}"
            found.append(Server(url=url, proc=gateway.running))
        return found

    def of(self, role: str) -> list[str]:
        return [name for name, member in self.members.items() if member.role == role]

    def leader(self) -> str | None:
        """The scheduler that leads: the lock's holder names its pid."""
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self.redis_url, socket_timeout=2) as client:
            holder = client.get("{expertmesh}:leader")
            for name in self.of("scheduler"):
                proc = self.members[name].proc
                if proc is not None and holder and f"-{proc.pid}-" in f"-{holder.decode()}-":
                    return name
        return None

    def whole(self) -> bool:
        """Whether all workers have what they need, and the leader counts them all. Its table may list the dead a while
        longer, so the workers are asked too."""
        leader = self.leader()
        workers = {role: self._begun(role) for role in ("experts", "attention", "colocated")}
        asked = [*itertools.chain(*workers.values()), *self.of("gateway")]
        if leader is None or not all(self.members[name].alive and is_ready(self._url(name)) for name in asked):
            return False
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{self._url(leader)}/metrics", timeout=2).text
            counted = metric_sum(text, "expertmesh_expert_seats"), metric_sum(text, "expertmesh_workers")
            both = len(workers["colocated"])
            return counted == (len(workers["experts"]) + both, len(workers["attention"]) + both)
        return False

    def _begun(self, role: str) -> list[str]:
        """Those that were started, whether or not they are alive."""
        return [name for name in self.of(role) if self.members[name].proc is not None]

    def wait_whole(self, seconds: float = READY_S) -> None:
        until(self.whole, "every worker is there", limit_s=seconds, every_s=0.1)

    def kill9(self, name: str) -> None:
        self.members[name].running.kill9()

    def terminate(self, name: str) -> None:
        self.members[name].running.popen.terminate()

    def metric(self, name: str, series: str, **labels: str) -> float:
        """Of one process; 0 where it does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            return metric_sum(httpx.get(f"{self._url(name)}/metrics", timeout=2).text, series, **labels)
        return 0.0

    def _url(self, name: str) -> str:
        [port] = self.members[name].ports.values()
        return f"http://{self.members[name].place.address}:{port}"

    def _names(self) -> list[str]:
        shape = self.shape
        counts = {"scheduler": shape.schedulers, "experts": shape.experts, "attention": shape.attention}
        counts["colocated"] = shape.colocated
        gateways = ["gateway", *(f"gateway-{i}" for i in range(1, shape.gateways))]
        return ["redis", *gateways, *(f"{role}-{i}" for role, count in counts.items() for i in range(count))]

    def _member(self, name: str, place: Place) -> Member:
        role = name.partition("-")[0]
        ports = {"port": free_port()} if role == "gateway" else {"metrics_port": free_port()}
        compute: dict[str, object] = {"dtype": "float32", "threads": 1, "fabric_secret_file": self._secret}
        attention = compute | {"model": self._model, "kv_blocks": 1024, "experts_timeout": TIMEOUT_S}
        own: dict[str, dict[str, object]] = {
            "redis": {},
            "gateway": {"model": self._model, "served_model_name": "pocket", "auth": "off"},
            "scheduler": {"expert_groups": self.shape.groups},
            "attention": attention | {"layout": "disaggregated"},
            "colocated": attention,
            "experts": compute | {"model": self._model},
        }
        common = {"host": place.address, "lease": self.shape.lease_s}
        options = own[role] | common | ports | dict(self._special(name))
        return Member(name=name, role=role, place=place, options=options, ports=ports)
