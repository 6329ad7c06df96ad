"""Cost: GPU-hours and tokens, and from a price that the reader types in what a million tokens cost."""

from __future__ import annotations

from observability.boards.board import Board, Row, Setting
from observability.panels import Limits, Query, Says, lines, once
from observability.queries import WORKER, rate, series

PRICE = Setting(
    name="price",
    title="Price of a GPU-hour",
    value="3.00",
    shows="What a GPU costs by the hour, in the currency in which costs are to be shown.",
)
_USED = 'state="used"'
_WITH_GPU = " + ".join(
    f"(count ({series(name, _USED)}) or vector(0))" for name in ("gpu_memory_bytes", "experts_gpu_memory_bytes")
)
_PROCESSES = " or ".join(
    f"max by (namespace, job, instance, {WORKER}) ({of})"
    for of in (series("build_info", 'role=~"attention.*"'), series("experts_status"))
)
GPUS = f"(({_WITH_GPU}) > 0 or count ({_PROCESSES}))"
"""GPUs in use: workers that report a GPU's memory; where none does, all workers, each counting as one."""
_HOURS = f"sum_over_time({GPUS}[$__range:1m]) / 60"
_GENERATED = f"sum (increase({series('generation_tokens_total')}[$__range]))"
_PROMPTS = f"sum (increase({series('prompt_tokens_total')}[$__range]))"
_COUNTED = (
    "A worker with a GPU counts as one GPU; where none has one, each worker counts. Workers that share a GPU "
    "are counted twice."
)

_HOUR = "1h"
_ADMITTED = rate("prompt_tokens_total", window=_HOUR)
_COMPUTED, _CACHED = (rate(name, window=_HOUR) for name in ("prefill_tokens_total", "prefix_cache_hit_tokens_total"))

_SUMS = Row(
    title="Over the time shown",
    panels=(
        once(
            Says(
                title="GPU-hours",
                unit="h",
                shows=f"GPUs in use, summed over the time shown. {_COUNTED}",
                act="what is paid for, whether it computes or not.",
                span=6,
                height=5,
            ),
            Query(expr=_HOURS),
            decimals=2,
        ),
        once(
            Says(
                title="Cost",
                unit="none",
                shows="GPU-hours times the price above, in its currency.",
                act="set the price that you pay.",
                span=6,
                height=5,
            ),
            Query(expr=f"{_HOURS} * $price"),
            decimals=2,
        ),
        once(
            Says(
                title="Cost of a million generated tokens",
                unit="none",
                shows="Cost divided by tokens delivered to clients; prompts are taken to be free.",
                act="falls with larger batches and fewer idle workers: see the share of busy time below.",
                span=6,
                height=5,
            ),
            Query(expr=f"{_HOURS} * $price / ({_GENERATED} / 1e6)"),
            decimals=2,
        ),
        once(
            Says(
                title="Cost of a million tokens",
                unit="none",
                shows="Cost divided by tokens of prompts and answers.",
                act="compare with what a hosted service asks for tokens of both kinds.",
                span=6,
                height=5,
            ),
            Query(expr=f"{_HOURS} * $price / (({_GENERATED} + {_PROMPTS}) / 1e6)"),
            decimals=2,
        ),
        once(
            Says(
                title="Generated tokens",
                unit="short",
                shows="Tokens delivered to clients in the time shown.",
                act="what the cost is divided by.",
                height=5,
            ),
            Query(expr=_GENERATED),
        ),
        once(
            Says(
                title="Tokens of prompts",
                unit="short",
                shows="Tokens of admitted prompts in the time shown, cached ones included.",
                act="many for each generated token: the prefix cache is worth its memory.",
                height=5,
            ),
            Query(expr=_PROMPTS),
        ),
    ),
)
_COURSE = Row(
    title="Over time",
    panels=(
        lines(
            Says(
                title="GPUs in use",
                unit="none",
                shows=f"GPUs that workers hold. {_COUNTED}",
                act="is to follow the load: see the autoscaler where it does not.",
            ),
            Query(expr=GPUS, legend="GPUs"),
        ),
        lines(
            Says(
                title="Cost of a million generated tokens",
                unit="none",
                shows="What GPUs cost by second, divided by tokens delivered by second, in millions.",
                act="peaks are hours without load: let the model sleep, or lower the least replicas.",
            ),
            Query(expr=f"{GPUS} * $price / 3600 / ({rate('generation_tokens_total')} > 0) * 1e6", legend="cost"),
        ),
        lines(
            Says(
                title="Tokens by GPU and second",
                unit="short",
                shows="Tokens delivered by second, divided by GPUs in use.",
                act="the figure to compare with measurements in docs/results.md.",
            ),
            Query(expr=f"{rate('generation_tokens_total')} / {GPUS}", legend="generated"),
            Query(expr=f"{rate('prompt_tokens_total')} / {GPUS}", legend="prompts"),
        ),
        lines(
            Says(
                title="Share of paid time that is idle",
                unit="percentunit",
                shows="Time without any sequence, of all time of attention workers.",
                act="lower the least replicas, or let the model sleep (--sleep-after).",
                limits=Limits(amber=0.5, red=0.9),
            ),
            Query(
                expr=f"{rate('engine_idle_seconds_total')} / count ({series('engine_idle_seconds_total')})",
                legend="idle",
            ),
            most=1,
        ),
        lines(
            Says(
                title="Work done twice",
                unit="none",
                shows="Tokens of prompts that workers computed or found in the prefix cache, for each token of "
                "admitted prompts, over an hour. 1 is once; several choices of a prompt (n) count several times.",
                act="attempts are repeated: see preemptions and lost attempts, under workers and overview.",
                limits=Limits(amber=1.2, red=2),
            ),
            Query(expr=f"({_COMPUTED} + {_CACHED}) / {_ADMITTED}", legend="times"),
        ),
    ),
)
BOARD = Board(
    name="cost",
    title="Cost",
    shows="GPU-hours and tokens, and what a million tokens cost at a price that you set.",
    rows=(_SUMS, _COURSE),
    settings=(PRICE,),
)
