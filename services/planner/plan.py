"""`expertmesh plan`: how to run a model on a number of GPUs: the layout, what to expect, and the command. Reads
config.json, no weights; needs no GPU.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from services.config import OptionParser, Settings, layer, parse_options
from services.errors import CheckpointError, ConfigError
from services.model.held_experts import held_experts
from services.model.held_linears import held_linears
from services.model.hub import config_folder
from services.model.load_spec import load_spec
from services.model.sources import promised_kinds
from services.model.spec import ModelSpec
from services.placement import DoesNotFit, counted, parallel_plan
from services.planner import trace as plan_trace
from services.planner.command import command, layout_of
from services.planner.estimate import (
    Row,
    between,
    exchanges,
    expert_times,
    held_bytes,
    inside,
    kv_bytes,
    row,
    usual_kind,
    weights,
)
from services.planner.figures import (
    ACROSS_GB,
    ACROSS_US,
    KINDS,
    LINK_US,
    LOCKSTEP_US,
    PREFILL_TOKENS,
    SHARED_ROWS,
    USED_MEMORY,
    Assumed,
)

_PROMPTS = (
    "Prompts are not counted: prefill runs on the same GPUs, so a load with prompts gets fewer tokens/s than this "
    f"(docs/operating.md, how many GPUs a load takes). A step has room for {PREFILL_TOKENS:,} tokens of prompts beside "
    "the decodes (--max-num-batched-tokens)."
)
_PREFILL = (
    "Quantised experts are faster where few rows of a step meet in one expert, as in decode, and slower than 16 bits "
    "from about 100 rows on, as in prefill (docs/models.md)."
)
_FP8 = (
    "FP8 experts are faster than 16 bits where a step has several rows, since rows are rounded to FP8, too; a step "
    "of one row is slower (docs/kernels.md)."
)
_UNMEASURED = "Layers of experts in {} were not measured: times are those of 16 bits, memory is theirs."
_MIXED = "Most layers of experts are in {}: times are theirs, memory is that of each layer."
_LARGE_STEPS = f" Steps of more than {SHARED_ROWS} tokens go to experts by NCCL or TCP, not through shared memory."
_INSTALL = "Run in a clone of expertmesh (docs/kubernetes-operations.md says what the cluster needs):"

Rows = dict[int, Row | None]
"""Batch size -> its estimate; None where it does not fit."""


def main(argv: Sequence[str]) -> int:
    """Prints a table, the recommended layout, and the command that runs it.

    Raises:
        ConfigError: a figure cannot be, or the model fits in no way.
        CheckpointError: there is no config.json that can be read.
    """
    if any(word.split("=")[0] == "--trace" for word in argv):
        return plan_trace.main(argv)
    options = parse_options(_parser(), argv, ["model", "revision", "expert_format", "dense_format"], positional=True)
    given, settings = Namespace(**options), _with_folder(layer(options).settings)
    _check(given)
    spec = _spec(settings)
    _check_context(spec, given)
    rows = _rows(spec, given)
    console = Console()
    with console.capture() as text:
        for part in _report(spec, settings, given, rows):
            console.print(part, highlight=False, soft_wrap=isinstance(part, Text))
    print(text.get(), end="")  # rich would end with 1 where nobody reads to the end
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        "expertmesh plan",
        "Recommend how to run a model on a number of GPUs: layout, expected tokens/s of answers, memory, and the "
        "command. Of the model it needs config.json alone, and MODEL may be that file. With --trace FILE: replicas and "
        "cost for a day of load; see `expertmesh plan --trace FILE --help`.",
    )

    def number(name: str, default: float, text: str, kind: type = float) -> None:
        metavar = "N" if kind is int else "X"
        parser.add_argument(name, default=default, type=kind, metavar=metavar, help=f"{text} (default: {default:g})")

    parser.add_argument("--gpus", required=True, type=int, metavar="N", help="number of GPUs, on all nodes together")
    parser.add_argument(
        "--gpu", default="h200", metavar="KIND", help=f"kind of GPU: {', '.join(KINDS)} (default: h200)"
    )
    number("--nodes", 1, "number of machines that the GPUs are spread over", int)
    parser.add_argument(
        "--tokens",
        default=[32, 256, 2048],
        type=_list,
        metavar="LIST",
        help="batch sizes to compare: requests that decode at the same time on all GPUs together, a token each in a "
        "step (default: 32,256,2048)",
    )
    number("--context", 1024, "tokens of context of each request", int)
    number("--skew", 1.5, "load of the busiest GPU's experts over the mean")
    parser.add_argument("--link-gb", type=float, metavar="X", help="GB/s between GPUs of a node (default: by --gpu)")
    number("--link-us", LINK_US, "latency of that link, in microseconds")
    number("--across-gb", ACROSS_GB, "GB/s between a GPU and those of other nodes")
    number("--across-us", ACROSS_US, "latency of that link, in microseconds")
    number("--lockstep-us", LOCKSTEP_US, "latency between GPUs of several nodes in lock-step, in microseconds")
    parser.add_argument("--batches", type=int, metavar="N", help="show ExpertFlow's plan for P = N batches in flight")
    parser.add_argument(
        "--block", type=int, metavar="N", help="show ExpertFlow's plan for blocks of E_block = N experts"
    )
    parser.add_argument("--weight-bits", help=SUPPRESS)
    return parser


def _list(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ArgumentTypeError(f"{text} is no list of whole numbers such as 32,256")
    return [int(part) for part in text.split(",")]


def _with_folder(settings: Settings) -> Settings:
    """Return ``settings`` with the model's folder where they name its config.json."""
    model = settings.model
    if model is None:
        raise ConfigError(
            "There is no model to plan for.",
            hint="Give its folder, its config.json, or ORG/NAME of the Hugging Face Hub.",
        )
    return settings.model_copy(update={"model": model.parent if model.name == "config.json" else model})


def _spec(settings: Settings) -> ModelSpec:
    folder = config_folder(settings)
    assert folder is not None, "checked before"
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder.", hint="Give a checkpoint's folder, its config.json, or ORG/NAME of the hub."
        )
    spec = load_spec(folder)
    if not spec.moe_layers:
        raise ConfigError(f"{settings.model} has no experts.", hint="The planner is for Mixture-of-Experts models.")
    experts = held_experts(spec, settings.held_experts, promised_kinds(spec), folder)
    linears = held_linears(spec, settings.dense_format, promised_kinds(spec))
    return dataclasses.replace(spec, experts=experts, linears=linears)


def _check(given: Namespace) -> None:
    if given.gpu not in KINDS:
        raise ConfigError(f"No figures for a GPU called {given.gpu}.", hint=f"Known: {', '.join(KINDS)}.")
    if given.gpus < 1 or given.nodes < 1 or given.gpus % given.nodes:
        raise ConfigError(
            f"{counted(given.gpus, 'GPU')} cannot be spread evenly over {counted(given.nodes, 'node')}.",
            hint="Choose 1 or more of both.",
        )
    if given.weight_bits is not None:
        raise ConfigError(
            "--weight-bits is no longer an option.",
            hint="Leave it out: --expert-format says how experts are held, and all other weights have 16 bits.",
        )


def _held(spec: ModelSpec) -> str:
    named = {"experts": spec.experts.label, "linear layers": spec.linears.label}
    parts = [f"{what} in {label}" for what, label in named.items() if label]
    return f" with {' and '.join(parts)}" if parts else " in 16 bits"


def _check_context(spec: ModelSpec, given: Namespace) -> None:
    if not 1 <= given.context <= spec.max_position:
        raise ConfigError(f"--context is {given.context}; expected 1 to {spec.max_position:,}, the model's own limit.")


def _rows(spec: ModelSpec, given: Namespace) -> Rows:
    """Return the estimate for each batch size.

    Raises:
        DoesNotFit: none of them fits.
    """
    rows: Rows = {}
    for tokens in given.tokens:
        try:
            rows[tokens] = row(spec, given, tokens)
        except DoesNotFit:
            rows[tokens] = None
    if any(rows.values()):
        return rows
    total, least = sum(held_bytes(spec)) / 1e9, min(rows)
    cache = f"{counted(least, 'request')} {least * kv_bytes(spec, given) / 1e9:.1f} GB"
    raise DoesNotFit(
        f"{given.gpus} x {given.gpu} cannot hold the model: its weights take {total:.1f} GB{_held(spec)}, the KV cache "
        f"of {cache}; of a GPU's {KINDS[given.gpu].memory / 1e9:.0f} GB {USED_MEMORY:.0%} can be used.",
        hint="Use more or larger GPUs, smaller batches (--tokens), or a shorter --context.",
    )


def _report(spec: ModelSpec, settings: Settings, given: Namespace, rows: Rows) -> Iterator[RenderableType]:
    """Yield the parts of the answer, the most important ones first. Strings are to be wrapped, a Text is not."""
    best = max(filter(None, rows.values()), key=lambda each: each.tokens_s)
    yield _title(spec, settings, given)
    if spec.quantisation is not None:
        yield f"The checkpoint is quantised ({spec.quantisation.method}); {_counted(spec)}."
    yield _table(given, rows, best)
    yield _recommended(given, rows, best)
    yield from _expert_times(spec)
    yield _PROMPTS + _LARGE_STEPS * (layout_of(best, given) == "disaggregated")
    yield _memory(given, best)
    yield "Run:" if given.nodes == 1 else _INSTALL
    yield Text(f"\n  {command(spec, settings, given, best)}\n")
    for tokens in given.tokens if given.nodes > 1 else ():
        yield _across(spec, given, tokens)
    if given.batches or given.block:
        yield _expertflow(spec, given)
    yield from _assumed(spec, given, best).lines()


def _counted(spec: ModelSpec) -> str:
    named = {"experts": spec.experts.label, "linear layers": spec.linears.label}
    parts = [f"{what} are counted as they are held, in {label}" for what, label in named.items() if label]
    rest = "other weights in 16 bits" if parts else "weights are counted as they are held, in 16 bits"
    return ", ".join([*parts, rest])


def _expert_times(spec: ModelSpec) -> Iterator[str]:
    """Yield what experts that are held quantised were taken to be as fast as."""
    if not spec.experts.label:
        return
    usual = usual_kind(spec)
    if usual != spec.experts.label:
        yield _MIXED.format(usual or "16 bits")
    if usual:
        yield _said_of(usual)


def _said_of(kind: str) -> str:
    if not expert_times(kind):
        return _UNMEASURED.format(kind)
    return _FP8 if kind.startswith("fp8") else _PREFILL


def _title(spec: ModelSpec, settings: Settings, given: Namespace) -> str:
    count = sum(weights(spec))
    dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
    where = f"{given.gpus} x {given.gpu}" + (f" in {given.nodes} nodes" if given.nodes > 1 else "")
    held = f", experts in {spec.experts.label}" if spec.experts.label else ""
    held += f", linear layers in {spec.linears.label}" if spec.linears.label else ""
    return (
        f"{settings.model} on {where}: {_billions(count)} billion parameters, {_gb(sum(held_bytes(spec)))} in {dtype}"
        f"{held}; "
        f"{spec.num_experts} experts, {spec.top_k} for each token."
    )


def _table(given: Namespace, rows: Rows, best: Row) -> Table:
    title = f"Decode, tokens/s (estimated), {given.context:,} tokens of context"
    table = Table(title=title, title_justify="left")
    ways = ("local, colocated", "disaggregated", "ping-pong")[: 3 if given.nodes > 1 else 2]
    for column in ("batch", *ways):
        table.add_column(column, justify="right")
    table.add_column("best layout")
    for tokens, found in rows.items():
        if found is None:
            table.add_row(f"{tokens:,}", *["-"] * len(ways), "does not fit")
            continue
        rates = ("-" if step == float("inf") else f"{tokens / step:,.0f}" for step in found.step_s[: len(ways)])
        mark = " *" if found is best else ""
        table.add_row(f"{tokens:,}", *rates, _name(found, given) + mark, style="bold" if mark else "")
    return table


def _name(found: Row, given: Namespace) -> str:
    mode, layout = found.mode, layout_of(found, given)
    if layout == "disaggregated":
        way = "ping-pong" if mode.choice == "pingpong" else layout
        return f"{way}, {mode.attention} + {mode.experts}"
    return layout if mode.degree in (1, given.gpus) else f"{layout} by {mode.degree}"


def _recommended(given: Namespace, rows: Rows, best: Row) -> str:
    expected = f"{best.tokens_s:,.0f} tokens/s, {best.best_s * 1e3:.1f} ms a token for each request"
    others = len(rows) > 1
    return (
        f"* Recommended for a batch of {best.batch:,}: {_name(best, given)}. Expect {expected}"
        f"{'; no batch above that fits gives more tokens/s' * others}. {best.mode.reason}"
        f"{' --tokens N plans for another batch.' * others}"
    )


def _memory(given: Namespace, best: Row) -> str:
    held, total = best.memory, f"of {KINDS[given.gpu].memory / 1e9:.0f} GB"
    has = f"has {_gb(held.weights)} of weights and {_gb(held.kv_gib * 2**30)} for the KV cache, {total}"
    if held.expert_weights:
        others = given.gpus - best.attention
        attention = "Each attention GPU" if best.attention > 1 else "The attention GPU"
        experts = f"each of {others} expert GPUs" if others > 1 else "the expert GPU"
        gpus = f"{attention} {has}; {experts} has {_gb(held.expert_weights)} of weights."
    else:
        gpus = f"{'Each' if given.gpus > 1 else 'The'} GPU {has}."
    most = counted(held.requests * best.attention, "request")
    return f"Memory: {gpus} At most {most} of {counted(given.context, 'token')} (--context) fit at a time."


def _gb(size: float) -> str:
    return f"{_billions(size)} GB"


def _billions(count: float) -> str:
    """Three digits, or those before the point."""
    return f"{count / 1e9:,.0f}" if count >= 999.5e9 else f"{count / 1e9:.3g}"


def _across(spec: ModelSpec, given: Namespace, tokens: int) -> str:
    flat, hierarchical = exchanges(spec, given, tokens)
    better = "hierarchical" if hierarchical.seconds < flat.seconds else "flat"
    return (
        f"A batch of {tokens:,} across {given.nodes} nodes: an exchange takes {flat.seconds * 1e6:,.0f} us flat and "
        f"{hierarchical.seconds * 1e6:,.0f} us hierarchical, with "
        f"{hierarchical.bytes_across / max(flat.bytes_across, 1):.0%} of the bytes and "
        f"{hierarchical.messages_across / max(flat.messages_across, 1):.0%} of the messages between nodes: {better} is "
        "better."
    )


def _expertflow(spec: ModelSpec, given: Namespace) -> str:
    """Return what ExpertFlow's equations 3.1 to 3.3 say."""
    block = given.block or -(-spec.num_experts // given.gpus)
    batches = given.batches or given.gpus
    plan = parallel_plan(batches, given.gpus, spec.num_experts, block)
    kinds = {"data parallelism": plan.data, "expert parallelism": plan.expert, "pipelining": plan.pipeline}
    chosen = ", ".join(name for name, holds in kinds.items() if holds) or "none of the three"
    return (
        f"ExpertFlow, P = {batches}, D = {given.gpus}, E_block = {block}: {chosen}; "
        f"{counted(plan.blocks, 'block')} of experts, at most {plan.blocks_per_device} on a GPU."
    )


def _assumed(spec: ModelSpec, given: Namespace, best: Row) -> Assumed:
    return Assumed(
        gpu=given.gpu,
        inside=inside(given),
        across=between(spec, given, best.batch) if given.nodes > 1 else None,
        lockstep_us=given.lockstep_us,
        skew=given.skew,
    )
