"""`expertmesh bench`: what is computed from what sides say, the measuring loop, the table, the file and the picture."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from testkit.fake_vllm import python_with_vllm
from testkit.gpu.decode_bench import Parts, load
from testkit.models.checkpoints import save_checkpoint

from loadgen.workload.words import Lengths
from services.bench import latency, throughput, vllm
from services.bench.loop import greedy, run, stepped
from services.bench.options import Given
from services.bench.picture import drawn
from services.bench.progress import Progress
from services.bench.report import Figure, Report, encoded, figure, origin
from services.bench.sides import Batch, Limits, Side, Timed, checked
from services.bench.table import text
from services.config import Settings
from services.errors import BenchFailed, CheckpointError, ConfigError, VllmMissing


@dataclass
class Scripted:
    """A side whose prompts take a millisecond each, and whose steps two."""

    name: str = "expertmesh"
    asked: list[Batch] = field(default_factory=list)
    short: int = 0

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"version": "1"}

    def run(self, batch: Batch, on_finished: Callable[[int], None]) -> Timed:
        self.asked.append(batch)
        on_finished(len(batch.prompts))
        seconds = 1e-3 * len(batch.prompts) + 2e-3 * (max(batch.answers) - 1)
        return Timed(seconds=seconds, tokens=[answer - self.short for answer in batch.answers])

    def close(self) -> None:
        pass


@pytest.fixture
def progress() -> Progress:
    class Nothing:
        def isatty(self) -> bool:
            return False

        def write(self, _text: str) -> None: ...

        def flush(self) -> None: ...

    return Progress(Nothing())  # type: ignore[arg-type]


ASKED = latency.Asked(batches=[1, 4], input_len=100, output_len=11, rounds=3, warmups=2, seed=0)


def measured(side: Side, progress: Progress) -> list[latency.Sample]:
    return list(latency.measure(side, ASKED, 5000, progress))


def test_a_decode_step_is_what_all_tokens_take_above_the_first(progress: Progress) -> None:
    side = Scripted()
    samples = measured(side, progress)
    assert [(each.batch, each.number) for each in samples] == [
        (batch, number) for batch in (1, 4) for number in range(3)
    ]
    assert [each.decode_ms for each in samples] == pytest.approx([2.0] * 6)
    assert [each.prefill_tokens_s for each in samples] == pytest.approx([100_000.0] * 6)
    assert [each.output_tokens for each in samples] == [12] * 3 + [48] * 3
    assert len(side.asked) == 2 * 2 * 5, "warm-ups are measured, and not kept"
    assert {len(prompt) for batch in side.asked for prompt in batch.prompts} == {100}
    assert all(10 <= token < 4990 for batch in side.asked for prompt in batch.prompts for token in prompt)


def test_an_answer_of_another_length_ends_the_bench(progress: Progress) -> None:
    with pytest.raises(BenchFailed, match="answer 0 has 0 tokens, and 1 were asked for"):
        measured(Scripted(short=1), progress)


def test_both_sides_get_the_same_prompts(progress: Progress) -> None:
    ours, theirs = Scripted(), Scripted("vLLM")
    samples = measured(ours, progress) + measured(theirs, progress)
    assert ours.asked == theirs.asked
    found = latency.figures(samples, ["expertmesh", "vLLM"])
    assert [each.name for each in found[:3]] == [
        "batch 1: decode step",
        "batch 1: prefill tokens",
        "batch 1: output tokens",
    ]
    assert [each.ratio for each in found] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 3}, "--batch-size 4 is more than the 3 sequences .* give --max-num-seqs 4"),
        ({"max_model_len": 110}, "111 tokens together exceed the 110 that the model takes"),
        ({"kv_tokens": 443}, "4 sequences of 111 tokens do not fit the KV cache, which holds 443"),
    ],
)
def test_batches_that_do_not_fit_are_refused(limits: dict[str, int], message: str) -> None:
    room = Limits(max_num_seqs=4, max_model_len=111, kv_tokens=444)
    latency.check(ASKED, room)
    with pytest.raises(ConfigError, match=message):
        latency.check(ASKED, replace(room, **limits))


def workload(**more: Any) -> Any:
    usual: dict[str, Any] = {"input_len": None, "output_len": None, "vocab": 500, "seed": 0}
    return throughput.workload("expertflow", more.pop("dataset", None), **(usual | more))


def test_a_workload_is_the_load_generators(progress: Progress, tmp_path: Path) -> None:
    source = workload(output_len=Lengths(5, 5))
    assert throughput.requests_of(source, None) == 2560
    batch = throughput.batch_of(source, 6, tmp_path)
    assert batch.answers == [5] * 6
    assert all(8 <= len(prompt) <= 128 and max(prompt) < 500 for prompt in batch.prompts)
    side = Scripted()
    asked = throughput.Asked(source=source, requests=6, rounds=2, warmups=4, seed=0)
    samples = list(throughput.measure(side, asked, batch, progress))
    assert [len(each.prompts) for each in side.asked] == [4, 6, 6]
    assert [(each.requests, each.output_tokens, each.input_tokens) for each in samples] == [
        (6, 30, batch.input_tokens)
    ] * 2
    rate = throughput.figures(samples, ["expertmesh"])[2].sides["expertmesh"]
    assert rate.median == pytest.approx(30 / samples[0].seconds)


def test_a_file_brings_its_own_requests(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [1, 2, 3], "max_tokens": 7}\n{"prompt": "words", "max_tokens": 2}\n')
    source = workload(dataset=file)
    assert throughput.requests_of(source, None) == 2
    assert throughput.batch_of(source, 1, tmp_path) == Batch(prompts=[[1, 2, 3]], answers=[7])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        throughput.batch_of(source, 2, tmp_path)
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n')
    with pytest.raises(ConfigError, match="Conversation 1 has messages before its prompt"):
        throughput.batch_of(workload(dataset=file), 1, tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return load(save_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_moe"), torch.device("cpu"), torch.float32)


def test_the_loop_counts_all_tokens_and_times_each_step(tiny: Parts) -> None:
    engine = tiny.engine(None, max_num_seqs=4, kv_blocks=64)
    ticks = itertools.count()
    found = run(engine, [greedy("a", [5] * 20, 3), greedy("b", [6] * 4, 5)], clock=lambda: float(next(ticks)))
    assert found.tokens == {"a": 3, "b": 5}
    assert [(step.rows, step.prompt_tokens) for step in found.steps] == [(24, 24), (2, 0), (2, 0), (1, 0), (1, 0)]
    assert [step.seconds for step in found.steps] == [1.0] * 5, "a clock that counts its readings"
    assert found.seconds == 7.0
    assert not found.preemptions


def test_the_loop_ends_with_an_error_of_the_engine(tiny: Parts) -> None:
    engine = tiny.engine(None, max_num_seqs=4, kv_blocks=64, max_model_len=16)
    engine.add(greedy("a", [5] * 20, 3))
    with pytest.raises(BenchFailed, match="The engine refuses a request"):
        list(stepped(engine))


def test_a_request_that_ends_early_in_the_loop_is_an_error(tiny: Parts) -> None:
    engine = tiny.engine(None, max_num_seqs=4, kv_blocks=64)
    with pytest.raises(BenchFailed, match="a asked for 30 tokens, got"):
        run(engine, [greedy("a", [5] * 4, 30)], on_step=lambda _step: engine.cancel("a", 1))


def test_fewer_tokens_than_asked_for_are_an_error() -> None:
    batch = Batch(prompts=[[1], [2]], answers=[3, 4])
    assert checked("s", batch, Timed(seconds=1.0, tokens=[3, 4])).seconds == 1.0
    with pytest.raises(BenchFailed, match="s: answer 1 has 3 tokens, and 4 were asked for"):
        checked("s", batch, Timed(seconds=1.0, tokens=[3, 3]))


def report(samples: Sequence[latency.Sample], figures: Sequence[Figure], *sides: str) -> Report:
    return Report(
        kind="latency", began_at=0.0, model="m", workload="w", seed=0, options={"batch_size": [1]},
        sides={side: {"version": "1"} for side in sides}, figures=figures, samples=samples, **origin(),
    )  # fmt: skip


def test_the_table_has_both_sides_and_their_ratio() -> None:
    figures = [figure("step", "ms", {"expertmesh": [2.0, 3.0, 1.0], "vLLM": [4.0, 4.0, 4.0]})]
    lines = text(report([], figures, "expertmesh", "vLLM")).splitlines()
    assert lines[-2].split() == ["expertmesh", "least", "most", "vLLM", "least", "most", "expertmesh", "/", "vLLM"]
    assert lines[-1].split() == ["step", "2", "ms", "1", "ms", "3", "ms", "4", "ms", "4", "ms", "4", "ms", "0.50"]


def test_the_report_says_how_experts_were_held() -> None:
    """Random weights are not held as those of a quantised checkpoint are."""
    found = report([], [], "expertmesh")
    sides = {"expertmesh": {"version": "1", "dtype": "float32", "experts": "fp8-128x128"}}
    assert "expertmesh: 1, float32, experts fp8-128x128" in text(replace(found, sides=sides)).splitlines()


@pytest.mark.parametrize(
    ("ours", "theirs", "line"),
    [
        (512, 8192, "--max-num-batched-tokens: expertmesh 512, vLLM 8,192"),
        (512, None, "--max-num-batched-tokens: expertmesh 512, vLLM its default"),
        (None, None, "--max-num-batched-tokens: expertmesh its default, vLLM its default"),
        (512, 512, None),
    ],
)
def test_the_table_says_where_a_step_takes_more_on_one_side(
    ours: int | None, theirs: int | None, line: str | None
) -> None:
    most = {"expertmesh": ours, "vLLM": theirs}
    sides = {side: {"max_num_seqs": 8, "max_num_batched_tokens": tokens} for side, tokens in most.items()}
    lines = text(replace(report([], [], "expertmesh", "vLLM"), sides=sides)).splitlines()
    assert [each for each in lines if each.startswith("--")] == ([] if line is None else [line])


def test_a_side_that_was_not_measured_is_a_dash() -> None:
    figures = [figure("requests", "requests/s", {"expertmesh": [2.0], "vLLM": []})]
    found = text(replace(report([], figures, "expertmesh", "vLLM"), cut_short=True))
    assert "CUT SHORT" in found
    assert found.splitlines()[-1].split() == ["requests", "2/s", "–", "–"]


def test_the_file_has_every_sample_and_where_they_come_from(progress: Progress) -> None:
    samples = measured(Scripted(), progress)
    found = json.loads(encoded(report(samples, latency.figures(samples, ["expertmesh"]), "expertmesh")))
    assert found["kind"] == "latency"
    assert found["version"]
    assert found["environment"]["cpus"] >= 1
    assert len(found["samples"]) == 6
    assert found["samples"][0] == {
        "side": "expertmesh", "batch": 1, "number": 0, "prefill_s": 1e-3, "whole_s": 0.021, "decode_ms": 2.0,
        "prefill_tokens_s": pytest.approx(100_000), "output_tokens_s": pytest.approx(11 / 0.021), "output_tokens": 12,
        "step_ms": [], "preemptions": 0,
    } | {"decode_ms": pytest.approx(2.0)}  # fmt: skip
    assert [each["sides"]["expertmesh"]["samples"] for each in found["figures"][:1]] == [pytest.approx([2.0] * 3)]


def test_the_picture_has_a_dot_for_each_sample(progress: Progress) -> None:
    samples = measured(Scripted(), progress) + measured(Scripted("vLLM"), progress)
    picture = drawn(report(samples, [], "expertmesh", "vLLM"))
    paths = [path.get("d", "") for path in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}path")]
    dots = [path.count("h0") for path in paths if "h0" in path]
    assert dots == [6, 6, 6, 6], "two plots of two sides"
    assert "vLLM, each round" in picture


def test_a_ctrl_c_ends_vllm_in_the_middle_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm.start(
        vllm.find(str(python_with_vllm(tmp_path))), {"model": "m", "skip_tokenizer_init": True, "max_model_len": 10**6}
    )
    assert engine.process.stdout is not None

    def pressed() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.process, "stdout", SimpleNamespace(readline=pressed))
    with pytest.raises(KeyboardInterrupt):
        engine.run(Batch(prompts=[[1]], answers=[10**5]), lambda _finished: None)
    engine.close()
    assert engine.process.returncode == -signal.SIGTERM


def test_secrets_stay_out_of_the_results() -> None:
    words = ["--api-key", "sk-12345678", "--redis-url", "redis://u:hidden@h/0", "--port", "1"]
    shown = json.dumps(Given(own=argparse.Namespace(seed=0), settings=Settings(), words=words).shown())
    assert "12345678" not in shown
    assert "hidden" not in shown
    assert '"--port", "1"' in shown


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., vllm.VllmEngine]]:
    started: list[vllm.VllmEngine] = []

    def start(options: str = "", **arguments: Any) -> vllm.VllmEngine:
        found = vllm.find(str(python_with_vllm(tmp_path)), options)
        started.append(vllm.start(found, {"model": "m", "skip_tokenizer_init": True, "max_model_len": 50} | arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()
        assert each.process.returncode == 0


def test_vllm_answers_batches_in_a_process_of_its_own(engine: Callable[..., vllm.VllmEngine]) -> None:
    side = engine("--max-num-seqs 7")
    assert side.facts["vllm"] == "0.25.1"
    assert side.facts["max_num_seqs"] == 7
    assert side.facts["max_num_batched_tokens"] == 8192, "its default, which no argument says"
    batch = Batch(prompts=[[1, 2], [3]], answers=[4, 40])
    heard: list[int] = []
    timed = checked("vLLM", batch, side.run(batch, heard.append))
    assert timed.seconds >= 0.02
    assert heard == [2]


def test_vllm_that_answers_too_little_is_an_error(engine: Callable[..., vllm.VllmEngine]) -> None:
    batch = Batch(prompts=[[1]], answers=[4])
    with pytest.raises(BenchFailed, match="vLLM: answer 0 has 3 tokens, and 4"):
        checked("vLLM", batch, engine(load_format="short").run(batch, lambda _: None))


@pytest.mark.parametrize("arguments", [{"dtype": "refused"}, {"no_such_argument": 1}])
def test_vllm_that_does_not_start_is_an_error(
    engine: Callable[..., vllm.VllmEngine], arguments: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchFailed, match="vLLM ended with 1"):
        engine(**arguments)
    assert "Error" in capfd.readouterr().err


def test_vllm_that_is_not_there_is_named() -> None:
    with pytest.raises(
        VllmMissing, match=r"vLLM is not installed in /nowhere/python.* --vllm /path/to/venv/bin/python"
    ):
        vllm.find("/nowhere/python")
    with pytest.raises(VllmMissing, match="it has no package vllm"):
        vllm.find(None)
