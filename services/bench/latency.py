"""`bench latency`: the time of a decode step, and how fast prompts go, by the number of sequences in the batch.

A batch is answered twice: by one token each, which is the prompts' time, and by all tokens. What lies between the two,
over the tokens between the two, is the time of a decode step. So both sides are measured from outside, alike.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.bench.progress import Progress
from services.bench.report import Figure, figure
from services.bench.sides import Batch, Limits, Side, checked
from services.errors import ConfigError

BATCHES = (1, 8, 32)
_FIRST_ID, _LAST_IDS = 10, 10
"""Ids at both ends of a vocabulary are often special."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """``rounds`` of each batch count, after ``warmups`` that do not."""

    batches: Sequence[int]
    input_len: int
    output_len: int
    rounds: int
    warmups: int
    seed: int

    @property
    def text(self) -> str:
        return f"prompts of {self.input_len} tokens, answers of {self.output_len}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One round. ``step_ms``: the steps that decoded the whole batch and nothing else, where the side says how long
    each took. ``output_tokens`` came in both runs together."""

    side: str
    batch: int
    number: int
    prefill_s: float
    whole_s: float
    decode_ms: float
    prefill_tokens_s: float
    output_tokens_s: float
    output_tokens: int
    step_ms: Sequence[float]
    preemptions: int


def check(asked: Asked, limits: Limits) -> None:
    """Looks whether the batches fit an engine.

    Raises:
        ConfigError: they do not.
    """
    most, length = max(asked.batches), asked.input_len + asked.output_len
    check_batch(most, limits.max_num_seqs)
    check_length(length, limits.max_model_len)
    if most * length > limits.kv_tokens:
        raise ConfigError(
            f"{most} sequences of {length} tokens do not fit the KV cache, which holds {limits.kv_tokens} tokens.",
            hint="Raise --kv-memory-gib, or lower --batch-size.",
        )


def check_batch(batch: int, max_num_seqs: int) -> None:
    """Raises ConfigError: ``batch`` sequences are more than an engine takes."""
    if batch > max_num_seqs:
        raise ConfigError(
            f"--batch-size {batch} is more than the {max_num_seqs} sequences that the engine takes at a time.",
            hint=f"Lower it, or give --max-num-seqs {batch}.",
        )


def check_length(length: int, max_model_len: int) -> None:
    """Raises ConfigError: a prompt with its answer is longer than the model's context."""
    if length > max_model_len:
        raise ConfigError(
            f"A prompt and its answer of {length} tokens together exceed the {max_model_len} that the model takes.",
            hint="Lower --input-len or --output-len.",
        )


def measure(side: Side, asked: Asked, vocab_size: int, progress: Progress) -> Iterator[Sample]:
    """Yields the samples of each batch as they are measured."""
    draw, ids = random.Random(asked.seed), range(_FIRST_ID, max(_FIRST_ID + 1, vocab_size - _LAST_IDS))
    prompts = [draw.choices(ids, k=asked.input_len) for _ in range(max(asked.batches))]
    for batch in asked.batches:
        progress.stage(f"{side.name}, batch {batch}")
        for number in range(-asked.warmups, asked.rounds):
            progress.note(f"{'warm-up' if number < 0 else f'round {number + 1} of {asked.rounds}'}")
            sample = _round(side, asked, prompts[:batch], max(number, 0))
            if number >= 0:
                yield sample


def _round(side: Side, asked: Asked, prompts: Sequence[Sequence[int]], number: int) -> Sample:
    count = len(prompts)
    one, all_of_them = (Batch(prompts=prompts, answers=[length] * count) for length in (1, asked.output_len))
    first = checked(side.name, one, side.run(one, _unheard))
    whole = checked(side.name, all_of_them, side.run(all_of_them, _unheard))
    return Sample(
        side=side.name,
        batch=count,
        number=number,
        prefill_s=first.seconds,
        whole_s=whole.seconds,
        decode_ms=1e3 * (whole.seconds - first.seconds) / (asked.output_len - 1),
        prefill_tokens_s=one.input_tokens / first.seconds,
        output_tokens_s=all_of_them.output_tokens / whole.seconds,
        output_tokens=sum(first.tokens) + sum(whole.tokens),
        step_ms=[round(1e3 * seconds, 4) for seconds in whole.decode_s],
        preemptions=first.preemptions + whole.preemptions,
    )


def _unheard(_finished: int) -> None:
    """Rounds are short: how far one is says nothing."""


def figures(samples: Sequence[Sample], sides: Sequence[str]) -> list[Figure]:
    """Returns three figures for each batch."""
    found = []
    for batch in dict.fromkeys(sample.batch for sample in samples):
        mine = _by_side([sample for sample in samples if sample.batch == batch], sides)
        name = f"batch {batch}"
        found += [
            figure(f"{name}: decode step", "ms", {side: [each.decode_ms for each in some] for side, some in mine}),
            figure(
                f"{name}: prefill tokens",
                "tokens/s",
                {side: [each.prefill_tokens_s for each in some] for side, some in mine},
            ),
            figure(
                f"{name}: output tokens",
                "tokens/s",
                {side: [each.output_tokens_s for each in some] for side, some in mine},
            ),
        ]
    return found


def _by_side(samples: Sequence[Sample], sides: Sequence[str]) -> list[tuple[str, list[Sample]]]:
    return [(side, [sample for sample in samples if sample.side == side]) for side in sides]


def medians(samples: Sequence[Sample], side: str, name: str) -> Mapping[int, float]:
    """Returns the median of the member ``name`` by batch, of one side."""
    batches = dict.fromkeys(sample.batch for sample in samples if sample.side == side)
    return {
        batch: statistics.median(getattr(each, name) for each in samples if (each.side, each.batch) == (side, batch))
        for batch in batches
    }
