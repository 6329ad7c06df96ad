"""A shard group of a release whose experts take long, as large ones do, and leave the node's processors to the others.

Python runs a ``sitecustomize`` that it finds as it starts: a ConfigMap brings one into the group's pods.
"""

from __future__ import annotations

import json
from typing import Any

from testkit.kube import Cluster

_NAME, _FOLDER, _PAIR_S = "slow-rows", "/etc/slow-rows", "SLOW_PAIR_SECONDS"
_SITE = f'''
import os, time
from services.model.experts import ExpertShard

pair_s, compute = float(os.environ["{_PAIR_S}"]), ExpertShard.forward

def forward(shard, layer, x_TD, ids_TK, weights_TK):
    until = time.perf_counter() + pair_s * len(x_TD)
    y = compute(shard, layer, x_TD, ids_TK, weights_TK)
    time.sleep(max(0.0, until - time.perf_counter()))
    return y

ExpertShard.forward = forward
'''


def slow_rows(cluster: Cluster, namespace: str) -> None:
    """What :func:`slow_group` mounts."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAME}}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(body | {"data": {"sitecustomize.py": _SITE}}))


def slow_group(group: int, pair_s: float) -> list[str]:
    """Words for helm: a row takes a seat of ``group`` so long with each of its experts, at least."""
    own = {
        "extraEnv": [
            {"name": "PYTHONPATH", "value": f"{_FOLDER}:/opt/worker"},
            {"name": _PAIR_S, "value": str(pair_s)},
        ],
        "extraVolumes": [{"name": _NAME, "configMap": {"name": _NAME}}],
        "extraVolumeMounts": [{"name": _NAME, "mountPath": _FOLDER, "readOnly": True}],
    }
    return [
        word
        for key, value in own.items()
        for word in ("--set-json", f"experts.perGroup.{group}.{key}={json.dumps(value)}")
    ]
