"""`expertmesh plan --trace`: replicas, GPU-hours, cost and attainment for a day of load, before anyone pays for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn

from services.config import OptionParser, check_bounds
from services.errors import ConfigError
from services.model.load_spec import load_spec
from services.planner.day.compare import compare
from services.planner.day.replay import Plant
from services.planner.day.report import figures, show
from services.planner.day.routing import check_shards, even_shares, read_shares
from services.planner.day.server import Targets
from services.planner.day.times import read_times
from services.planner.day.trace import Trace, read_trace
from services.scheduler.scaling import Bounds, ScalingOptions

MAX_SHARDS = 256


def main(argv: Sequence[str]) -> int:
    """Replay a day, print tables, and return the exit code.

    Raises:
        ConfigError: the trace, another file or an option is not as it must be.
        CheckpointError: --model has no config.json that can be read.
    """
    given = _parser().parse_args(argv)
    _check(given)
    trace = read_trace(Path(given.trace))
    plant = _plant(given, trace)
    with _progress(len(trace.minutes)) as progress:
        found = compare(trace, plant, _options(given), scale=given.scale_requests, seed=given.seed, progress=progress)
    console = Console()
    console.print(f"Service times: {plant.times.source}. Rows by topic: {given.routing or 'even'}.", highlight=False)
    show(console, trace, plant, found, gpu_hour_cost=given.gpu_hour_cost)
    if given.json:
        _write(Path(given.json), msgspec.json.encode(figures(trace, plant, found)))
    return 0


def _parser() -> OptionParser:
    about = "Replay a day of load through the scaling policy, against a model of the server."
    parser = OptionParser("expertmesh plan --trace FILE", about)

    def number(name: str, default: float, text: str, kind: Callable[[str], float] = float) -> None:
        metavar = "N" if kind is int else "X"
        parser.add_argument(name, default=default, type=kind, metavar=metavar, help=f"{text} (default: {default})")

    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="CSV: a row for each minute (docs/autoscaling.md)"
    )
    parser.add_argument("--times", metavar="FILE", help="JSON of service times (default: assumed ones)")
    parser.add_argument(
        "--routing", metavar="FILE", help="JSON of each topic's rows by layer and expert (default: even)"
    )
    parser.add_argument("--model", metavar="PATH", help="a checkpoint, to check that the shards divide its experts")
    number("--shards", 4, "shard groups", int)
    number("--scale-requests", 1.0, "times the trace's requests")
    number("--target-ttft", 2.0, "seconds to the first token")
    number("--target-tpot", 0.1, "seconds between tokens")
    number("--max-num-seqs", 64, "sequences that an attention worker has places for", int)
    number("--max-replicas", 64, "replicas of a shard group at most", int)
    number("--max-attention", 64, "attention workers at most", int)
    number("--min-replicas", 1, "replicas of a shard group at least, while awake", int)
    number("--min-attention", 1, "attention workers at least, while awake", int)
    number("--sleep-after", 0.0, "seconds without requests after which the model sleeps; 0: never")
    number("--scale-down-after", 120.0, "seconds for which fewer replicas must have sufficed")
    number("--start-seconds", 60.0, "until a replica that is wanted serves")
    number("--drain-seconds", 15.0, "until a replica that is not wanted any more is gone")
    number("--attention-gpus", 1.0, "GPUs of an attention worker")
    number("--shard-gpus", 1.0, "GPUs of a replica of a shard group")
    number("--gpu-hour-cost", 2.5, "cost of an hour of one GPU, in any currency")
    number("--seed", 0, "seed of the arrivals", int)
    parser.add_argument("--json", metavar="FILE", help="write all figures there, minute by minute")
    return parser


def _check(given: Namespace) -> None:
    over_zero = ("scale_requests", "target_ttft", "target_tpot", "max_num_seqs", "min_replicas", "min_attention")
    zero_or_more = (
        *("sleep_after", "scale_down_after", "start_seconds", "drain_seconds"),
        *("attention_gpus", "shard_gpus", "gpu_hour_cost"),
    )
    for name in (*over_zero, *zero_or_more):
        value, least = getattr(given, name), "more than 0" if name in over_zero else "0 or more"
        if not 0 <= value < 1e9 or (name in over_zero and value == 0):
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; expected {least}.")
    check_bounds(given, ("replicas", "attention"))
    if not 1 <= given.shards <= MAX_SHARDS:
        raise ConfigError(f"--shards is {given.shards}; expected 1 to {MAX_SHARDS}.")


def _plant(given: Namespace, trace: Trace) -> Plant:
    if given.model:
        check_shards(given.shards, load_spec(Path(given.model).expanduser()).num_experts)
    shares = even_shares(len(trace.topics), given.shards)
    if given.routing:
        shares = read_shares(Path(given.routing), trace.topics, given.shards)
    return Plant(
        times=read_times(Path(given.times) if given.times else None),
        targets=Targets(ttft_s=given.target_ttft, tpot_s=given.target_tpot),
        places=given.max_num_seqs,
        shares=shares,
        start_s=given.start_seconds,
        drain_s=given.drain_seconds,
        attention_gpus=given.attention_gpus,
        shard_gpus=given.shard_gpus,
    )


def _options(given: Namespace) -> ScalingOptions:
    return ScalingOptions(
        bounds={
            "experts": Bounds(minimum=given.min_replicas, maximum=given.max_replicas),
            "attention": Bounds(minimum=given.min_attention, maximum=given.max_attention),
            "gateway": Bounds(minimum=1, maximum=1),
        },
        sleep_after_s=given.sleep_after,
        down_after_s=given.scale_down_after,
    )


@contextmanager
def _progress(minutes: int) -> Iterator[Callable[[str, int], None]]:
    with Progress(
        *Progress.get_default_columns(), TextColumn("minute {task.completed}"), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("", total=minutes)

        yield lambda name, minute: bar.update(task, description=name, completed=minute)


def _write(path: Path, data: bytes) -> None:
    try:
        path.expanduser().write_bytes(data)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
