"""The command that runs a model as a plan recommends: `expertmesh serve` on one machine, `helm install` on several."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace

from services.config import ENV_PREFIX, Settings
from services.model.hub import hub_name
from services.model.spec import ModelSpec
from services.planner.estimate import Row, in_one_node
from services.planner.figures import PREFILL_TOKENS

_CHART = ("helm", "install", "mesh", "helm/expertmesh", "-f", "helm/expertmesh/values-multi-node.yaml")


def layout_of(row: Row, given: Namespace) -> str:
    """Return the value of --layout."""
    if row.mode.choice != "colocated":
        return "disaggregated"
    if row.mode.degree == 1:
        return "local"
    return "colocated" if in_one_node(row.mode.degree, given) else "lockstep"


def command(spec: ModelSpec, settings: Settings, given: Namespace, row: Row) -> str:
    """Return the command, as it is typed into a shell."""
    words = _serve(spec, settings, given, row) if given.nodes == 1 else _install(spec, settings, given, row)
    return shlex.join(words)


def _everywhere(spec: ModelSpec, settings: Settings) -> dict[str, object]:
    """Return the settings that attention and expert workers share."""
    found: dict[str, object] = {"dtype": "bfloat16"} if spec.dtype == "float32" else {}
    return found | ({} if settings.expert_format == "auto" else {"expert_format": settings.expert_format})


def _linears(settings: Settings) -> dict[str, object]:
    """Return the setting that says how linear layers are held, which help and chart do not name."""
    return {} if settings.dense_format == "dense" else {"dense_format": settings.dense_format}


def _engine(row: Row) -> dict[str, object]:
    """Return the settings of attention workers that follow from memory and batch."""
    sequences = math.ceil(row.batch / row.attention)
    found: dict[str, object] = {
        "kv_memory_gib": row.memory.kv_gib,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": sequences + PREFILL_TOKENS,
    }
    if row.mode.choice == "pingpong":
        found["overlap"] = "on"
    return found


def _serve(spec: ModelSpec, settings: Settings, given: Namespace, row: Row) -> list[str]:
    layout, mode = layout_of(row, given), row.mode
    options: dict[str, object] = {"revision": settings.revision} if settings.revision else {}
    options |= {"layout": layout, "workers": row.attention}
    if layout == "disaggregated":
        options |= {"expert_workers": mode.experts, "expert_groups": mode.experts}
    if layout == "colocated":
        options |= {"expert_groups": mode.degree}
    options |= _engine(row) | _everywhere(spec, settings) | _linears(settings)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["expertmesh", "serve", str(settings.model), *words]


def _install(spec: ModelSpec, settings: Settings, given: Namespace, row: Row) -> list[str]:
    layout, mode, here = layout_of(row, given), row.mode, given.gpus // given.nodes
    values: dict[str, object] = _model(settings) | {"layout": layout}
    if layout == "disaggregated":
        values |= {"attention.replicas": mode.attention, "experts.groups": mode.experts, "experts.replicas": 1}
    elif layout == "local":
        values |= {"attention.replicas": given.gpus}
    elif layout == "colocated":
        values |= {"attention.replicas": given.nodes, "attention.workers": here}
        values |= {"attention.colocated.groups": mode.degree, r"attention.resources.limits.nvidia\.com/gpu": here}
    else:
        values |= {"attention.replicas": given.gpus // mode.degree, "attention.workers": mode.degree}
    if layout != "lockstep":  # every GPU is taken: an update has none for one more
        values |= {"attention.rollingUpdate.maxSurge": 0, "attention.rollingUpdate.maxUnavailable": 1}
    values |= {f"attention.config.{name}": value for name, value in _engine(row).items()}
    values |= {f"config.{name}": value for name, value in _everywhere(spec, settings).items()}
    for name, value in _linears(settings).items():
        for role in ("attention", "experts"):
            variable = {"name": f"{ENV_PREFIX}{name.upper()}", "value": value}
            values |= {f"{role}.extraEnv[0].{key}": part for key, part in variable.items()}
    return [*_CHART, "--set", ",".join(f"{name}={value}" for name, value in values.items())]


def _model(settings: Settings) -> dict[str, object]:
    assert settings.model is not None, "checked before"
    wanted = None if settings.model.exists() else hub_name(str(settings.model))
    if wanted is None:
        return {
            "model.source": "hostPath",
            "model.hostPath.path": settings.model.absolute(),
            "model.pvc.prefetch.enabled": "false",
        }
    revision = wanted.revision or settings.revision or "main"
    return {"model.pvc.prefetch.source": f"hf://{wanted.name}@{revision}"}
