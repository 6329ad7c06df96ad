"""`expertmesh plan`: which way to run a model on so many GPUs, and why. Reads config.json, no weights; needs no GPU."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.config import OptionParser
from services.errors import CheckpointError, ConfigError
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.placement import Batch, Gpus, Link, Mode, Shapes, choose_mode, parallel_plan
from services.placement.planning.exchange_cost import Cost, Nodes, Rows, exchange_cost
from services.placement.planning.layer_times import ACTIVATION_BYTES
from services.planner import trace as plan_trace
from services.planner.figures import (
    ACROSS_GB,
    ACROSS_US,
    KINDS,
    LINK_US,
    LOCKSTEP_US,
    REACHED_BANDWIDTH,
    REACHED_FLOPS,
    REACHED_LINK,
    Assumed,
)


def main(argv: Sequence[str]) -> int:
    """Prints a table and what to run.

    Raises:
        ConfigError: a figure cannot be, or the weights fit in no way.
        CheckpointError: there is no config.json that can be read.
    """
    if any(word.split("=")[0] == "--trace" for word in argv):
        return plan_trace.main(argv)
    given = _parser().parse_args(argv)
    spec = load_spec(_folder(Path(given.model)))
    if not spec.moe_layers:
        raise ConfigError(f"{given.model} has no experts.", hint="The planner is for Mixture-of-Experts models.")
    _check(given)
    console = Console()
    modes = {tokens: _mode(spec, given, tokens) for tokens in given.tokens}
    console.print(_table(spec, given, modes))
    for tokens, mode in modes.items():
        console.print(f"{tokens} tokens a step: {mode.reason}", highlight=False, soft_wrap=True)
    if given.nodes > 1:
        for tokens in given.tokens:
            console.print(_across(spec, given, tokens), highlight=False, soft_wrap=True)
    console.print(_expertflow(spec, given), highlight=False, soft_wrap=True)
    for line in _assumed(spec, given).lines():
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Run: {_command(modes[given.tokens[-1]], given)}", highlight=False, soft_wrap=True)
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        "expertmesh plan",
        "Say which way to run a model on so many GPUs, and why. With --trace FILE: replicas and cost for a day of "
        "load; see `expertmesh plan --trace FILE --help`.",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="folder of a checkpoint, or its config.json")
    parser.add_argument("--gpus", required=True, type=int, metavar="N", help="how many, in all")
    parser.add_argument("--gpu", default="h200", metavar="KIND", help=f"{', '.join(KINDS)} (default: h200)")
    parser.add_argument("--nodes", default=1, type=int, metavar="N", help="machines that they are on (default: 1)")
    parser.add_argument("--link-gb", type=float, metavar="X", help="GB/s of one GPU to others of its node (by kind)")
    parser.add_argument("--link-us", default=LINK_US, type=float, metavar="X", help="its latency (default: 4.1)")
    parser.add_argument(
        "--lockstep-us",
        default=LOCKSTEP_US,
        type=float,
        metavar="X",
        help="latency of GPUs of several nodes in lock-step (2500)",
    )
    parser.add_argument(
        "--across-gb", default=ACROSS_GB, type=float, metavar="X", help="GB/s of one GPU to other nodes (50)"
    )
    parser.add_argument("--across-us", default=ACROSS_US, type=float, metavar="X", help="its latency (default: 20)")
    parser.add_argument(
        "--tokens",
        default=[32, 256, 2048],
        type=_list,
        metavar="LIST",
        help="tokens of a step, of all GPUs (32,256,2048)",
    )
    parser.add_argument("--context", default=1024, type=int, metavar="N", help="tokens that a token attends to (1024)")
    parser.add_argument("--skew", default=1.5, type=float, metavar="X", help="hottest over mean expert load (1.5)")
    parser.add_argument("--weight-bits", default=16, type=int, metavar="N", help="16, 8 or 4 (default: 16)")
    parser.add_argument("--batches", type=int, metavar="N", help="in-flight batches, ExpertFlow's P (default: --gpus)")
    parser.add_argument("--block", type=int, metavar="N", help="experts in a block, its E_block (default: one GPU's)")
    return parser


def _list(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ArgumentTypeError(f"{text} is no list of whole numbers such as 32,256")
    return [int(part) for part in text.split(",")]


def _folder(path: Path) -> Path:
    path = path.expanduser()
    if path.is_dir():
        return path
    if path.name == "config.json" and path.is_file():
        return path.parent
    raise CheckpointError(
        f"{path} is no folder and no config.json.", hint="Give --model a checkpoint in the hub's layout."
    )


def _check(given: Namespace) -> None:
    if given.gpu not in KINDS:
        raise ConfigError(f"No figures for a GPU called {given.gpu}.", hint=f"Known: {', '.join(KINDS)}.")
    if given.gpus < 1 or given.nodes < 1 or given.gpus % given.nodes:
        raise ConfigError(
            f"{given.gpus} GPUs cannot be spread evenly over {given.nodes} nodes.", hint="Choose 1 or more of both."
        )
    if given.weight_bits not in (4, 8, 16):
        raise ConfigError(f"Weights of {given.weight_bits} bits are not known.", hint="Choose 16, 8 or 4.")


def _mode(spec: ModelSpec, given: Namespace, tokens: int) -> Mode:
    kind = KINDS[given.gpu]
    shapes = Shapes(
        hidden=spec.hidden_size,
        expert_width=spec.expert_ffn,
        experts=spec.num_experts,
        top_k=spec.top_k,
        layers=len(spec.moe_layers),
        weight_bytes=given.weight_bits / 8,
        dense_weights=_dense_weights(spec),
    )
    gpus = Gpus(
        count=given.gpus,
        bandwidth=kind.bandwidth * REACHED_BANDWIDTH,
        flops=kind.flops * REACHED_FLOPS,
        memory=kind.memory,
    )
    link = _link(spec, given, tokens)
    lockstep = Link(bandwidth=link.bandwidth, latency=max(given.lockstep_us / 1e6, link.latency))

    def together(degree: int) -> Link:
        return _inside(given) if _in_one_node(degree, given) else lockstep

    kv_bytes = 2.0 * spec.kv_size * ACTIVATION_BYTES * given.context
    return choose_mode(shapes, link, gpus, Batch(tokens=tokens, kv_bytes=kv_bytes, skew=given.skew), together=together)


def _in_one_node(degree: int, given: Namespace) -> bool:
    """Return whether every ``degree`` GPUs sharing experts are of one node: they have seats, others lock-step."""
    return bool(given.gpus // given.nodes % degree == 0)


def _dense_weights(spec: ModelSpec) -> int:
    """Return the weights of a layer's projections, router and shared expert."""
    projections = 2 * spec.hidden_size * (spec.q_size + spec.kv_size)
    return projections + spec.hidden_size * (spec.num_experts + 3 * spec.shared_ffn)


def _link(spec: ModelSpec, given: Namespace, tokens: int) -> Link:
    """Return the link between any two GPUs. Across nodes it has the bandwidth with which the flat exchange would be as
    fast as the best one."""
    if given.nodes == 1:
        return _inside(given)
    flat, hierarchical = _ways(spec, given, tokens)
    gain = max(flat.bytes_across / hierarchical.bytes_across, 1.0) if hierarchical.seconds < flat.seconds else 1.0
    return Link(bandwidth=given.across_gb * 1e9 * gain, latency=given.across_us / 1e6)


def _inside(given: Namespace) -> Link:
    """Return the link between GPUs of one node: memory that seats share, as expert workers do."""
    gb = KINDS[given.gpu].link * REACHED_LINK / 1e9 if given.link_gb is None else given.link_gb
    return Link(bandwidth=gb * 1e9, latency=given.link_us / 1e6, joined=False)


def _ways(spec: ModelSpec, given: Namespace, tokens: int) -> tuple[Cost, Cost]:
    """Return the cost of the flat and of the hierarchical exchange, where all GPUs share one copy of the experts."""
    ranks, inside = given.gpus // given.nodes, _inside(given)
    nodes = Nodes(
        count=given.nodes,
        ranks=ranks,
        across_latency=given.across_us / 1e6,
        across_bandwidth=given.across_gb * 1e9 * ranks,
        inside_latency=inside.latency,
        inside_bandwidth=inside.bandwidth,
    )
    rows = Rows(
        tokens=max(tokens // given.gpus, 1),
        row_bytes=spec.hidden_size * ACTIVATION_BYTES,
        experts=spec.num_experts,
        top_k=spec.top_k,
    )
    return exchange_cost("flat", nodes, rows), exchange_cost("hierarchical", nodes, rows)


def _assumed(spec: ModelSpec, given: Namespace) -> Assumed:
    return Assumed(
        gpu=given.gpu,
        inside=_inside(given),
        across=_link(spec, given, given.tokens[-1]) if given.nodes > 1 else None,
        lockstep_us=given.lockstep_us,
        context=given.context,
        skew=given.skew,
        weight_bits=given.weight_bits,
    )


def _table(spec: ModelSpec, given: Namespace, modes: dict[int, Mode]) -> Table:
    what = f"{spec.num_experts} experts, {spec.top_k} a token, on {given.gpus} x {given.gpu}"
    table = Table(title=f"{what}: microseconds a layer, estimated", title_justify="left")
    for column in ("tokens", "co-located", "disaggregated", "in ping-pong"):
        table.add_column(column, justify="right")
    table.add_column("run")
    for tokens, mode in modes.items():
        times = (mode.colocated_s, mode.disaggregated_s, mode.pingpong_s)
        table.add_row(str(tokens), *map(_microseconds, times), _name(mode, given))
    return table


def _microseconds(seconds: float) -> str:
    return "does not fit" if seconds == float("inf") else f"{seconds * 1e6:.1f}"


def _name(mode: Mode, given: Namespace) -> str:
    if mode.choice == "colocated":
        if mode.degree == 1:
            return "all-in-one" if given.gpus == 1 else "all-in-one on every GPU"
        return f"co-located by {mode.degree}"
    way = "in ping-pong" if mode.choice == "pingpong" else "disaggregated"
    return f"{way}, {mode.attention} + {mode.experts}"


def _across(spec: ModelSpec, given: Namespace, tokens: int) -> str:
    flat, hierarchical = _ways(spec, given, tokens)
    better = "hierarchical" if hierarchical.seconds < flat.seconds else "flat"
    return (
        f"{tokens} tokens a step across {given.nodes} nodes: an exchange takes {flat.seconds * 1e6:.0f} us flat, "
        f"{hierarchical.seconds * 1e6:.0f} us hierarchical "
        f"({hierarchical.bytes_across / max(flat.bytes_across, 1):.0%} of the bytes across, "
        f"{hierarchical.messages_across / max(flat.messages_across, 1):.0%} of the messages): {better}."
    )


def _expertflow(spec: ModelSpec, given: Namespace) -> str:
    """Return what ExpertFlow's equations 3.1 to 3.3 say."""
    block = given.block or -(-spec.num_experts // given.gpus)
    batches = given.batches or given.gpus
    plan = parallel_plan(batches, given.gpus, spec.num_experts, block)
    kinds = {"data parallelism": plan.data, "expert parallelism": plan.expert, "pipelining": plan.pipeline}
    chosen = ", ".join(name for name, holds in kinds.items() if holds) or "none of the three"
    return (
        f"ExpertFlow, P = {batches}, D = {given.gpus}, E_block = {block}: {chosen}; {plan.blocks} blocks of experts, "
        f"at most {plan.blocks_per_device} on a GPU."
    )


def _command(mode: Mode, given: Namespace) -> str:
    model = f"expertmesh serve --model {given.model}"
    if mode.choice != "colocated":
        overlap = "on" if mode.choice == "pingpong" else "off"
        return (
            f"{mode.attention} x `expertmesh attention --layout disaggregated --overlap {overlap}`, "
            f"{mode.experts} x `expertmesh experts` (docs/operating.md)"
        )
    if mode.degree > 1:
        here = given.gpus // given.nodes
        if not _in_one_node(mode.degree, given):
            copies = f"{given.gpus // mode.degree} times " if mode.degree < given.gpus else ""
            return (
                f"{copies}{mode.degree} x `expertmesh attention --layout lockstep --workers {mode.degree} --rank R "
                "--lockstep-address HOST:PORT` (docs/operating.md)"
            )
        groups = f" --expert-groups {mode.degree}" if mode.degree < here else ""  # of as many replicas as copies
        nodes = f", on each of {given.nodes} nodes" if given.nodes > 1 else ""
        return f"{model} --layout colocated --workers {here}{groups}{nodes}"
    return model if given.gpus == 1 else f"`expertmesh attention` on each of {given.gpus} GPUs (docs/operating.md)"
