"""A deployment under the chart's limits, with honest clients at work and somebody who watches.

Redis with ``maxmemory 768mb`` in 1 GiB, a scheduler, a gateway in 1 GiB that asks for keys, and a stand-in attention
worker (:mod:`abuse.kit.standin`) or the real one with the pocket model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import redis
from testkit.pocket.answers import POCKET
from testkit.processes.servers import Bench, Proc, flags, free_port, is_ready
from testkit.waiting import until

from abuse.kit.cage import MIB, Cage, Group, cage, precedence, rss_mib
from abuse.kit.child import Child, raise_descriptors, share_paths
from services.gateway.auth import digest

GATEWAY_MIB, REDIS_MIB = 1024, 1024
MAXMEMORY = "768mb"
HONEST = ("alice", "bob")
ATTACKER = "mallory"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_START_S = 90.0
_WELL_S = 5.0
_WORN_MIB = 250.0
"""A gateway that holds more is not given to the next attack."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is asked for; equal shapes may share a deployment.

    ``streams`` honest ones, of which half (without ``short``, all) last for ``long_tokens``; ``rate`` tokens a second
    each. ``keys``: tenant -> limits of its key, besides the usual ones. ``gateway``: further options of its command
    line. ``real``: the pocket model's attention worker instead of the stand-in, and no honest streams. ``keep_s``: how
    long the gateway remembers an Idempotency-Key, where not as long as usual.
    """

    streams: int = 8
    short: bool = True
    rate: float = 10.0
    long_tokens: int = 36_000
    context: int = 131_072
    seats: int = 2048
    prefill: int = 32_768
    lease_s: float = 6.0
    nofile: int | None = None
    real: bool = False
    keys: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    gateway: tuple[tuple[str, object], ...] = ()
    keep_s: float | None = None


@dataclass(kw_only=True)
class Stage:
    """Use through :func:`on_stage`."""

    bench: Bench
    shape: Shape
    folder: Path
    model: Path
    secrets: dict[str, str]
    port: int = field(default_factory=free_port)
    redis_port: int = field(default_factory=free_port)
    procs: dict[str, Proc] = field(default_factory=dict)
    cages: dict[str, Cage] = field(default_factory=dict)
    crowd: Child | None = None
    watch: Child | None = None
    asked_to_end: set[int] = field(default_factory=set)
    cpu: Group = field(default_factory=precedence)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.redis_port}/0"

    @property
    def key_file(self) -> Path:
        return self.folder / "keys.yaml"

    def store(self) -> redis.Redis:
        return redis.Redis(port=self.redis_port, socket_timeout=60)

    def alive(self) -> list[str]:
        """Roles whose process has not ended."""
        return [role for role, proc in self.procs.items() if proc.popen.poll() is None]

    def ready(self) -> bool:
        return is_ready(self.url, timeout_s=5)

    def rss_mib(self) -> float:
        """Resident memory of the gateway now."""
        with contextlib.suppress(OSError):
            return rss_mib(self.procs["gateway"].pid)
        return 0.0

    def start(self) -> None:
        """Returns when everything is up and each honest stream has begun."""
        self.procs["redis"] = self.bench.redis(
            *("--maxmemory", MAXMEMORY, "--maxmemory-policy", "noeviction"),
            port=self.redis_port,
            append_only=False,
            within=partial(self._held, role="redis", mib=REDIS_MIB),
        )
        lease = {"redis_url": self.redis_url, "lease": self.shape.lease_s, "supervisor_pid": os.getpid()}
        self._start("scheduler", [sys.executable, "-m", "services.scheduler", *flags(**lease)])
        self.start_gateway()
        self.start_worker()
        until(self.ready, "the gateway is ready", limit_s=_START_S, every_s=0.1)
        self._start_watch()
        self._start_crowd()

    def start_gateway(self) -> None:
        options: dict[str, object] = {"model": self.model, "served_model_name": "pocket", "port": self.port}
        options |= {"redis_url": self.redis_url, "lease": self.shape.lease_s, "supervisor_pid": os.getpid()}
        options |= {"auth": "required", "api_keys_file": self.key_file, "request_timeout": 3600}
        keep_s = self.shape.keep_s
        module = ["services.gateway"] if keep_s is None else ["abuse.kit.forgetful_gateway", str(keep_s)]
        command = [sys.executable, "-m", *module, *flags(**(options | dict(self.shape.gateway)))]
        self._start("gateway", command, GATEWAY_MIB, nofile=self.shape.nofile)
        if self.watch is not None:
            self.watch.ask("follow", gateway=self.procs["gateway"].pid, port=self.port)

    def start_worker(self) -> None:
        shape = self.shape
        if shape.real:
            options = flags(
                model=self.model, redis_url=self.redis_url, lease=shape.lease_s, dtype="float32", threads=1,
                kv_blocks=1024, served_model_name="pocket", supervisor_pid=os.getpid(),
            )  # fmt: skip
            self._start("attention", [sys.executable, "-m", "services.attention", *options])
            return
        config = {name: getattr(shape, name) for name in ("rate", "prefill", "seats", "lease_s")}
        config |= {"redis_url": self.redis_url, "model": str(self.model)}
        self._start("attention", [sys.executable, "-m", "abuse.kit.standin", json.dumps(config)])

    def close(self) -> None:
        for child in (self.crowd, self.watch):
            if child is not None:
                child.close()
        self.bench.close()
        for each in self.cages.values():
            each.close()
        self.cpu.close()

    def limits(self) -> dict[str, str]:
        """How they are held, for a report."""
        return {role: each.how for role, each in self.cages.items()} | {"cpu": self.cpu.how}

    def _start(self, role: str, command: list[str], mib: int | None = None, nofile: int | None = None) -> None:
        self.procs[role] = self.bench.start(role, self._held(command, role, mib, nofile))

    def _held(self, command: Sequence[str], role: str, mib: int | None = None, nofile: int | None = None) -> list[str]:
        """``command`` under the limits of that role."""
        if mib is not None or nofile is not None:
            self.cages[role] = cage(role, (mib or 1 << 14) * MIB, nofile=nofile)
            command = self.cages[role].command(command)
        return self.cpu.command(command)

    def _start_watch(self) -> None:
        pids = {role: self.procs[role].pid for role in ("gateway", "redis")}
        where = {"host": "127.0.0.1", "port": self.port, "redis_port": self.redis_port}
        self.watch = Child("abuse.kit.watch", where | pids, self.folder / "watch.log", self.cpu.command)

    def _start_crowd(self) -> None:
        if not self.shape.streams:
            return
        config = {
            "url": self.url,
            "keys": {name: self.secrets[name] for name in HONEST},
            "streams": self.shape.streams,
            "short": self.shape.short,
            "long_tokens": self.shape.long_tokens,
            "model": str(self.model),
        }
        self.crowd = crowd = Child("abuse.kit.honest", config, self.folder / "honest.log", self.cpu.command)

        def begun() -> bool:
            return bool(crowd.ask("report", since=0, until=time.monotonic())["started"] == self.shape.streams)

        until(begun, "each honest stream has begun", limit_s=_START_S, every_s=0.2)


def write_keys(path: Path, known: Mapping[str, str], limits: Mapping[str, Mapping[str, int]]) -> None:
    """A file of API keys. Nobody's priority is named unless ``limits`` do."""
    keys = [{"name": name, "sha256": digest(secret), **limits.get(name, {})} for name, secret in known.items()]
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"keys": keys}, indent=1))
    os.replace(draft, path)


def long_context_model(folder: Path, context: int) -> Path:
    """The pocket model's configuration and tokenizer with another context and a template that has turns."""
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(POCKET / "model" / name, model)
    config = json.loads((POCKET / "model/config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    (model / "chat_template.jinja").write_text(CHATML)
    return model


@contextlib.contextmanager
def on_stage(shape: Shape, folder: Path | None = None) -> Iterator[Stage]:
    """A deployment of that shape for the length of the block; logs are printed when it fails."""
    share_paths()
    raise_descriptors()
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertmesh-abuse-")))
        model = POCKET / "model" if shape.real else long_context_model(folder, shape.context)
        known = {name: secrets.token_urlsafe(24) for name in (*HONEST, ATTACKER)}
        shape = replace(shape, streams=0) if shape.real else shape
        stage = Stage(bench=Bench(folder=folder), shape=shape, folder=folder, model=model, secrets=known)
        limits = {name: dict(of_key) for name, of_key in shape.keys}
        write_keys(stage.key_file, known, limits)
        stack.callback(stage.close)
        try:
            stage.start()
            yield stage
        except BaseException:
            for proc in stage.bench.procs:
                print(f"--- {proc.name} (pid {proc.pid}, exit {proc.popen.poll()})\n{proc.log()[-3000:]}")
            raise


def well(stage: Stage) -> bool:
    """Whether another attack may have it: the next one must not be held responsible for the last one."""
    if len(stage.alive()) < len(stage.procs) or not stage.ready() or stage.rss_mib() > _WORN_MIB:
        return False
    end = time.monotonic() + _WELL_S
    while stage.crowd is not None and time.monotonic() < end:
        seen = stage.crowd.ask("report", since=time.monotonic() - 1, until=time.monotonic())
        if seen["started"] == stage.shape.streams and seen["longest"] < 1:  # short ones have just begun now and then
            return True
        time.sleep(0.2)
    return stage.crowd is None


class Stages:
    """Deployments one at a time: the last one again where it has the shape that is asked for and is well."""

    def __init__(self, well: Callable[[Stage], bool]) -> None:
        self._well = well
        self._stack = contextlib.ExitStack()
        self._stage: Stage | None = None
        self._numbers = itertools.count()

    def of(self, shape: Shape) -> Stage:
        wanted = replace(shape, streams=0) if shape.real else shape
        if self._stage is None or self._stage.shape != wanted or not self._well(self._stage):
            self.close()
            self._stage = self._stack.enter_context(on_stage(shape))
        return self._stage

    def close(self) -> None:
        self._stage = None
        self._stack.close()
