"""What a running server wants of whoever starts replicas: the shard that is waited for grows, all sleep, all wake."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from testkit.processes.servers import Bench, Server, bench, flags, free_port, metric_sum
from testkit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 4.0
SLEEP_AFTER_S = 4.0
CALL_S = 0.03
"""Of the slow shard; the other takes a millisecond."""

pytestmark = pytest.mark.alone


class Deployment:
    """Two attention workers, a slow seat of group 0 and one of group 1; nobody starts or stops replicas."""

    def __init__(self, stage: Bench, model: Path) -> None:
        port, self._metrics, http = free_port(), free_port(), free_port()
        secret = stage.folder / "secret"
        secret.write_bytes(b"0123456789abcdef0123456789abcdef")
        stage.redis(port=port)
        common = {"redis_url": f"redis://127.0.0.1:{port}/0", "lease": LEASE_S}
        compute = common | {"model": model, "dtype": "float32", "threads": 1, "fabric_secret_file": secret}
        scaling = {"autoscale": "on", "sleep_after": SLEEP_AFTER_S, "scale_down_after": 2}
        stage.role("scheduler", **common, **scaling, expert_groups=2, metrics_port=self._metrics)
        slow = [sys.executable, str(ROOT / "tests/testkit/fabric/slow_seat.py"), str(CALL_S)]
        stage.start("slow seat", [*slow, *flags(**compute, expert_group=0)])
        stage.role("experts", **compute, expert_group=1)
        for _ in range(2):
            stage.role("attention", **compute, layout="disaggregated", kv_blocks=256)
        gateway = stage.role("gateway", **common, model=model, served_model_name="tiny", port=http)
        self.server = Server(url=f"http://127.0.0.1:{http}", proc=gateway)
        self.server.wait_ready()
        until(lambda: self.series("expertmesh_workers") == 2, "both attention workers are there")

    def page(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10).text

    def series(self, name: str, **labels: str) -> float:
        return metric_sum(self.page(), name, **labels)

    def wanted(self) -> dict[str, float]:
        page = self.page()
        shards = {shard: metric_sum(page, "expertmesh_wanted_replicas", role="experts", shard=shard) for shard in "01"}
        roles = {role: metric_sum(page, "expertmesh_wanted_replicas", role=role) for role in ("attention", "gateway")}
        return shards | roles

    def is_held_up_by_the_slow_shard(self) -> bool:
        page = self.page()
        busy = [metric_sum(page, "expertmesh_shard_busy_ratio", shard=shard) for shard in "01"]
        return busy[0] > 0.5 > busy[1] and metric_sum(page, "expertmesh_shard_stall_ratio", shard="0") > 0.5

    def ask(self, tokens: int) -> None:
        body = {"model": "tiny", "prompt": [3, 1, 4], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120).raise_for_status()

    @contextmanager
    def load(self) -> Iterator[None]:
        """Four requests at any time, for two workers."""
        ended = threading.Event()

        def keep_asking() -> None:
            while not ended.is_set():
                self.ask(24)

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking) for _ in range(4)]
            try:
                yield
            finally:
                ended.set()
        for one in asking:
            one.result()


def test_the_shard_that_is_waited_for_grows_then_all_sleep_and_wake_together(tiny: Path, tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        mesh = Deployment(stage, tiny)
        awake = {"0": 1, "1": 1, "attention": 1, "gateway": 1}
        with mesh.load():
            until(lambda: mesh.wanted()["0"] == 2, "two seats of the slow shard are wanted")
            until(mesh.is_held_up_by_the_slow_shard, "its seat is busy and waited for, the other one is not")
            assert mesh.wanted()["1"] == 1
        idle_since = time.monotonic()
        until(lambda: mesh.wanted() == awake | {"0": 0, "1": 0, "attention": 0}, "the model sleeps whole")
        assert time.monotonic() - idle_since >= SLEEP_AFTER_S - 1.5  # the leader looks each second
        needed = partial(mesh.series, "expertmesh_needed_replicas", role="experts", shard="0")
        until(lambda: needed() < 0.5, "the load of before has faded")
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(mesh.ask, 200)
            until(lambda: all(mesh.wanted().values()), "a request wakes it", every_s=0.1)
            until(lambda: mesh.wanted() == awake, "one of each is enough")
        asking.result()
