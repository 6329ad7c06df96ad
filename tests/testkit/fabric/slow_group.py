"""A shard group of a release whose experts take long, as large ones do, and leave the node's processors to the others.

Python runs a ``sitecustomize`` that it finds as it starts: a ConfigMap brings one into the group's pods.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.fabric import slow
from testkit.kube.chart import PACKAGES
from testkit.kube.cluster import Cluster

_NAME, _FOLDER, _PAIR_S = "slow-rows", "/etc/slow-rows", "SLOW_PAIR_SECONDS"
_SITE = f'''
import os
from services.model.experts import ExpertShard
from slow import slow_shards

slow_shards(ExpertShard, row_s=float(os.environ["{_PAIR_S}"]))
'''


def slow_rows(cluster: Cluster, namespace: str) -> None:
    """What :func:`slow_group` mounts."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAME}}
    body["data"] = {"sitecustomize.py": _SITE, "slow.py": Path(slow.__file__).read_text(encoding="utf-8")}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(body))


def slow_group(group: int, pair_s: float) -> list[str]:
    """Words for helm: a row takes a seat of ``group`` so long with each of its experts, at least."""
    own = {
        "extraEnv": [
            {"name": "PYTHONPATH", "value": f"{_FOLDER}:/opt/worker:{PACKAGES}"},
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
