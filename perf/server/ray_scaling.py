"""Scaling on Ray by the scheduler's own numbers: load comes and goes, a shard group grows, all sleep and wake.

    PYTHONPATH=.:kernels:tests .venv/bin/python perf/server/ray_scaling.py [--load-s 240] [--streams 16]

One Ray node, the pocket model, four attention workers and two shard groups of one to three seats. A target for the time
per token that two cores cannot hold makes the groups that steps wait for the bottleneck. Latencies are heard 45 s after
seats have changed, so the load lasts until the first group has three, or --load-s. Each change is a line: seconds,
the scheduler's numbers, the processes that are ready, requests answered and failed.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections import Counter
from typing import Any

import httpx
import ray
from ray import serve
from testkit.pocket.answers import POCKET
from testkit.processes.servers import free_port

from services.ray import app

_APP = "scaling"
_BODY = {"model": "pocket", "prompt": "define: violinist\n", "max_tokens": 64, "ignore_eos": True}
_SETTINGS = {
    "model": str(POCKET / "model"),
    "served_model_name": "pocket",
    "auth": "off",
    "threads": 1,
    "layout": "disaggregated",
    "workers": 4,
    "expert_workers": 2,
    "expert_groups": 2,
    "fabric_lane": "tcp",
    "autoscale": "on",
    "min_attention": 4,
    "max_attention": 4,
    "min_replicas": 1,
    "max_replicas": 3,
    "scale_down_after": 5,
    "sleep_after": 30,
    "target_tpot": 0.005,
}


class Load:
    """Clients that ask again and again while :attr:`on` is set."""

    def __init__(self, url: str, streams: int) -> None:
        self.on, self.answered, self.failed = threading.Event(), 0, 0
        self._url = url
        for _ in range(streams):
            threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        with httpx.Client(timeout=120) as client:
            while True:
                self.on.wait()
                good = client.post(f"{self._url}/v1/completions", json=_BODY).status_code == 200
                self.answered, self.failed = self.answered + good, self.failed + (not good)


class Watch:
    """Prints a line for each change."""

    def __init__(self, load: Load) -> None:
        self._load, self._began, self._last = load, time.monotonic(), ""
        self._handle = serve.get_deployment_handle("Controller", _APP)

    def until(self, what: str, limit_s: float, done: Any) -> None:
        """Look until ``done`` of the ready processes by kind, or for ``limit_s``."""
        print(f"-- {what}", flush=True)
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            found: dict[str, Any] = self._handle.overview.remote().result()
            ready = Counter(row["unit"].rpartition("-")[0] for row in found["units"] if row["state"] == "ready")
            line = f"wanted {found['targets']}, ready {dict(sorted(ready.items()))}"
            if line != self._last:
                self._last = line
                counts = f"{self._load.answered} answered, {self._load.failed} failed"
                print(f"{time.monotonic() - self._began:5.0f} s  {line}; {counts}", flush=True)
            if done(ready):
                return
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-s", type=float, default=240.0)
    parser.add_argument("--streams", type=int, default=16)
    options = parser.parse_args()
    ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        worker = {"cpus": 0.5}
        serve.run(app({"settings": _SETTINGS, "attention": worker, "experts": worker}), name=_APP, route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        load = Load(url, options.streams)
        watch = Watch(load)
        watch.until("start", 180, lambda ready: ready["attention"] == 4)
        load.on.set()
        watch.until("load", options.load_s, lambda ready: ready["experts-0"] == 3)
        load.on.clear()
        watch.until("no load", 120, lambda ready: set(ready) == {"scheduler"})
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/completions", json=_BODY, timeout=120)
        print(f"-- a request wakes the model: {answer.status_code} after {time.monotonic() - began:.1f} s")
    finally:
        serve.delete(_APP)
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
