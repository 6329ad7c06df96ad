"""`bench throughput`: all requests at once, offline, and how long they take together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.workload.conversation import Source
from loadgen.workload.files import FromFile, read_prompts
from loadgen.workload.lengths import EXPERT_FLOW_REQUESTS, LENGTHS
from loadgen.workload.synthetic import Singles
from loadgen.workload.words import Lengths, Prompts
from services.bench.latency import check_length
from services.bench.progress import Progress
from services.bench.report import Figure, figure
from services.bench.sides import Batch, Limits, Side, checked
from services.errors import ConfigError
from services.model.load_spec import tokenizer_file

WORKLOADS = ("expertflow", "long")
"""Those of the load generator whose prompts do not depend on answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """``requests`` of ``source``, in ``rounds``, after ``warmups`` requests that do not count."""

    source: Source
    requests: int
    rounds: int
    warmups: int
    seed: int

    @property
    def text(self) -> str:
        return f"{self.requests:,} requests at once, {self.source.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One round. ``finished_s``: when each request ended, in order, where the side says it."""

    side: str
    number: int
    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int
    finished_s: Sequence[float]
    preemptions: int


def workload(
    kind: str, dataset: Path | None, *, input_len: Lengths | None, output_len: Lengths | None, vocab: int, seed: int
) -> Source:
    """Returns the workload: that of a file, or of ``kind`` with other lengths where they are given.

    Raises:
        LoadError: the file cannot be used.
    """
    if dataset is not None:
        return read_prompts(dataset, most_tokens=(output_len or LENGTHS["file"][1]).most)
    usual_input, usual_output = LENGTHS[kind]
    return Singles(
        prompts=Prompts(ids=True, vocabulary=vocab),
        prompt_tokens=input_len or usual_input,
        output_tokens=output_len or usual_output,
        seed=seed,
    )


def requests_of(source: Source, asked: int | None) -> int:
    """Returns how many requests there are where nobody says it: those of a file, or ExpertFlow's."""
    if asked is not None:
        return asked
    return len(source.conversations) if isinstance(source, FromFile) else EXPERT_FLOW_REQUESTS


def batch_of(source: Source, requests: int, folder: Path, first: int = 0) -> Batch:
    """Returns the first turns of ``requests`` conversations. Text becomes tokens with the tokenizer in ``folder``.

    Raises:
        ConfigError: a conversation has messages, which only a server puts together.
        CheckpointError: a tokenizer is needed, and there is none.
    """
    prompts: list[Sequence[int]] = []
    answers = []
    tokenizer = None
    for number in range(first, first + requests):
        conversation = source.conversation(number)
        turn = conversation.turns[0]
        if conversation.history or conversation.system:
            raise ConfigError(
                f"Conversation {number + 1} has messages before its prompt.",
                hint="Use `expertmesh bench serve`, where the server makes one prompt of them.",
            )
        content = turn.content
        if isinstance(content, str):
            if tokenizer is None:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(tokenizer_file(folder)))
            content = tokenizer.encode(content).ids
        prompts.append(content)
        answers.append(turn.output_tokens or 1)
    return Batch(prompts=prompts, answers=answers)


def check(batch: Batch, limits: Limits) -> None:
    """Raises ConfigError: a request is longer than the model's context."""
    check_length(batch.longest, limits.max_model_len)


def measure(side: Side, asked: Asked, batch: Batch, progress: Progress) -> Iterator[Sample]:
    """Yields a sample for each round."""
    if asked.warmups:
        progress.stage(f"{side.name}, warm-up")
        few = Batch(prompts=batch.prompts[: asked.warmups], answers=batch.answers[: asked.warmups])
        checked(side.name, few, side.run(few, lambda _finished: None))
    for number in range(asked.rounds):
        progress.stage(f"{side.name}, round {number + 1} of {asked.rounds}")
        timed = checked(
            side.name, batch, side.run(batch, lambda finished: progress.note(f"{finished:,} of {asked.requests:,}"))
        )
        yield Sample(
            side=side.name,
            number=number,
            seconds=timed.seconds,
            requests=len(batch.prompts),
            input_tokens=batch.input_tokens,
            output_tokens=sum(timed.tokens),
            finished_s=[round(at, 6) for at in timed.finished_s],
            preemptions=timed.preemptions,
        )


def figures(samples: Sequence[Sample], sides: Sequence[str]) -> list[Figure]:
    """Returns requests, and tokens in and out, a second."""
    mine = [(side, [sample for sample in samples if sample.side == side]) for side in sides]
    return [
        figure(
            "requests", "requests/s", {side: [each.requests / each.seconds for each in some] for side, some in mine}
        ),
        figure(
            "input tokens",
            "tokens/s",
            {side: [each.input_tokens / each.seconds for each in some] for side, some in mine},
        ),
        figure(
            "output tokens",
            "tokens/s",
            {side: [each.output_tokens / each.seconds for each in some] for side, some in mine},
        ),
    ]
