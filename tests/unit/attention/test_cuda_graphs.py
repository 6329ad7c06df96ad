"""Replayed steps give the tokens, counts and cache of others, by recorded graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.gpu.decode_bench import load, request, run
from testkit.gpu.recorded_graph import record
from testkit.models.tiny_models import CONFIGS, save_model

from moe_kernels import backend
from services.attention.step.engine import Engine
from services.attention.step.fixed_inputs import row_buckets
from services.attention.step.overlap import OverlapPolicy
from services.errors import ConfigError
from services.fabric.local import LocalLink
from services.model.products import InvariantProducts

POCKET = Path(__file__).parents[3] / "examples/pocket-moe"
PROMPTS = [[5, 9, 11], [3], [7] * 14, [2, 4, 6, 8, 10], [90, 80, 70, 60, 50, 40, 30]]
MakeEngine = Callable[..., Engine[Any]]


class Keyed(LocalLink):
    """``key`` is that of its steps; the steps in ``failing`` are wrong at first. Counts captures."""

    key: Hashable | None = "one"
    captured = 0
    failing: frozenset[int] = frozenset()
    _step, _tries = 0, 0

    def begin_step(self, step: int, rows: object) -> None:
        del rows
        self._tries = self._tries + 1 if step == self._step else 1
        self._step = step

    def finish_step(self) -> bool:
        return self._step not in self.failing or self._tries > 1

    def graph_key(self) -> Hashable | None:
        return self.key

    @contextmanager
    def capture_context(self, rows: int) -> Iterator[Hashable | None]:
        del rows
        self.captured += 1
        yield self.key


def keyed(tiny: Any) -> Keyed:
    local = tiny.link()
    return Keyed(local._experts, num_experts=8)


def tokens(engine: Engine[Any], prompts: list[list[int]] = PROMPTS, count: int = 9) -> list[list[int]]:
    requests = [request(f"r{at}", prompt, count, ignore_eos=False) for at, prompt in enumerate(prompts)]
    return list(run(engine, requests).tokens.values())


def with_window(tiny: Any, folder: Path) -> Any:
    """The model with a window of five positions."""
    config = json.loads((tiny.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 5}))
    (folder / "model.safetensors").symlink_to(tiny.folder / "model.safetensors")
    return replace(tiny, folder=folder)


@pytest.mark.parametrize("sequences", [1, 2, 3, 5])
def test_tokens_are_the_oracles(sequences: int, tiny: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(capture=record, max_num_seqs=6)
    engine.prepare()
    graphs = len(row_buckets(6)) + len([rows for rows in row_buckets(64) if rows >= 8])
    assert engine.stats().graphs == graphs, "for as many decodes as there are sequences, and as many rows as a step has"
    prompts = PROMPTS[:sequences]
    assert tokens(engine, prompts) == [tiny.greedy(prompt, 9) for prompt in prompts]
    stats = engine.stats()
    assert stats.graph_steps == stats.steps > 0
    assert stats.graphs == graphs


@pytest.mark.parametrize("budget", [1, 4, 7])
def test_chunks_of_prompts_together_with_decodes(budget: int, tiny: Any, make_engine: MakeEngine) -> None:
    """And from the prefix cache, the second time."""
    engine = make_engine(capture=record, max_num_seqs=3, max_num_batched_tokens=budget)
    engine.prepare()
    for _ in range(2):
        assert tokens(engine) == [tiny.greedy(prompt, 9) for prompt in PROMPTS]
    stats = engine.stats()
    assert stats.graph_steps == stats.steps
    assert stats.prefix_hit_tokens > 0
    assert (stats.prefill_chunks > 0) == (budget < 14)


def test_steps_of_more_rows_than_any_graph_run_without(
    monkeypatch: pytest.MonkeyPatch, tiny: Any, make_engine: MakeEngine
) -> None:
    """Prompts of fourteen tokens and of seven, in steps of at most sixteen rows: 14 + 2, then 5 beside a decode."""
    prompts = [PROMPTS[2], PROMPTS[4]]
    for most, eagerly in ((16, 0), (15, 1), (6, 1), (5, 2)):
        monkeypatch.setattr("services.attention.step.cuda_graphs.MAX_ROWS", most)
        engine = make_engine(capture=record, max_num_batched_tokens=16)
        engine.prepare()
        assert tokens(engine, prompts) == [tiny.greedy(prompt, 9) for prompt in prompts]
        assert engine.stats().steps - engine.stats().graph_steps == eagerly, most


@pytest.mark.parametrize(("mode", "most", "split"), [("on", 2048, 7), ("auto", 2048, 0), ("auto", 3, 1)])
def test_what_suits_a_graph_is_split_only_where_the_policy_insists(
    monkeypatch: pytest.MonkeyPatch, tiny: Any, make_engine: MakeEngine, mode: Any, most: int, split: int
) -> None:
    """It would like to split every step. Of a prompt alone, which comes first, it cannot."""
    monkeypatch.setattr("services.attention.step.cuda_graphs.MAX_ROWS", most)
    policy = OverlapPolicy(mode)
    engine = make_engine(capture=record, overlap=policy)
    engine.prepare()
    tokens(engine, PROMPTS[:1], 1)
    assert engine.stats().graph_steps == 1
    policy.cut = lambda sequences: 1 if len(sequences) > 1 else None  # type: ignore[method-assign]
    assert tokens(engine, PROMPTS[:2], 7) == [tiny.greedy(prompt, 7) for prompt in PROMPTS[:2]]
    stats = engine.stats()
    assert (stats.overlapped_steps, stats.steps - stats.graph_steps) == (split, split)


def test_a_policy_that_splits_while_there_is_no_key_does_not_keep_graphs_away(
    tiny: Any, make_engine: MakeEngine
) -> None:
    link, policy = keyed(tiny), OverlapPolicy("auto")
    engine = make_engine(link=link, capture=record, overlap=policy)
    engine.prepare()
    policy.cut = lambda sequences: 1 if len(sequences) > 1 else None  # type: ignore[method-assign]
    policy.note = lambda *_, **__: None  # type: ignore[method-assign]
    link.key = None
    assert tokens(engine, PROMPTS[:2], 40) == [tiny.greedy(prompt, 40) for prompt in PROMPTS[:2]]
    stats = engine.stats()
    assert (stats.graph_steps, stats.overlapped_steps) == (0, 38), "two were left whole to see"
    link.key = "one"
    tokens(engine, PROMPTS[:2], 40)
    assert engine.stats().overlapped_steps - stats.overlapped_steps == 24, "until the next look"
    assert engine.stats().graph_steps == 16


def test_scores_of_a_prompt(make_engine: MakeEngine) -> None:
    found = []
    for capture in (None, record):
        engine = make_engine(capture=capture)
        engine.prepare()
        engine.add(request("r", [5, 9, 11, 2, 4], 2, prompt_logprobs=2))
        events = [event for _ in range(4) for event in engine.step()]
        found.append([score for event in events for score in event.prompt_logprobs or [] if score is not None])
        assert (engine.stats().graph_steps > 0) == (capture is not None)
    eager, replayed = found
    assert [score.top for score in eager] != []
    assert [[token for token, _ in score.top] for score in eager] == [[t for t, _ in score.top] for score in replayed]
    assert [score.logprob for score in eager] == pytest.approx([score.logprob for score in replayed], abs=1e-5)


def test_rows_of_nobody_are_counted_nowhere_and_touch_nothing(make_engine: MakeEngine) -> None:
    """Three sequences in a graph of four rows, after five in one of eight: the old rows' blocks are others' by now."""
    eager, graphs = make_engine(), make_engine(capture=record)
    graphs.prepare()
    for prompts in (PROMPTS, PROMPTS[:3]):
        assert tokens(eager, prompts) == tokens(graphs, prompts)
    inputs = graphs._graphs._decodes.of(4)  # type: ignore[union-attr]
    assert inputs.token_ids_T[:3].all()
    assert not inputs.token_ids_T[3], "it may be one that is not a number"
    assert eager._runner.link._link.expert_rows() == graphs._runner.link._link.expert_rows()  # type: ignore[attr-defined]
    for layer in range(3):
        for ours, theirs in zip(eager._kv.layer(layer), graphs._kv.layer(layer), strict=True):
            torch.testing.assert_close(ours[:-1], theirs[:-1])


def test_with_the_kernel_itself(tiny: Any, make_engine: MakeEngine) -> None:
    """In the interpreter, experts and router too."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "kv_blocks": 16, "max_model_len": 32}
    engine = make_engine(capture=record, **sizes)
    with backend.forced("triton"):
        engine.prepare()
        assert tokens(engine, PROMPTS[:3], 3) == [tiny.greedy(prompt, 3) for prompt in PROMPTS[:3]]
    assert engine.stats().graph_steps == engine.stats().steps


def test_invariant_products_have_one_kind_of_graph_for_all_steps(tiny: Any, make_engine: MakeEngine) -> None:
    """In the interpreter, all kernels of such an engine."""
    parts = load(tiny.folder, torch.device("cpu"), torch.float32, InvariantProducts())
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_blocks": 16, "max_model_len": 32}
    engine = make_engine(model=parts.model, link=parts.link(), capture=record, **sizes)
    with backend.forced("triton"):
        engine.prepare()
        assert engine.stats().graphs == 2, "of 8 rows and of 16"
        assert tokens(engine, PROMPTS[:3], 3) == [tiny.greedy(prompt, 3) for prompt in PROMPTS[:3]]
    assert engine.stats().graph_steps == engine.stats().steps


def test_a_window(tiny: Any, make_engine: MakeEngine, tmp_path: Path) -> None:
    windowed = with_window(tiny, tmp_path)
    eager, graphs = (make_engine(model=windowed.dense(), capture=capture) for capture in (None, record))
    graphs.prepare()
    found = tokens(graphs)
    assert found == tokens(eager)
    assert found != tokens(make_engine()), "the window changes nothing: these prompts do not show it"
    assert graphs.stats().graph_steps == graphs.stats().steps > 0


@pytest.mark.parametrize("name", ["glm4-groups", "exaone", "ernie", "gpt-oss"])
def test_routers_with_a_bias_other_rotations_and_sinks(name: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS[name])
    parts = load(tmp_path, torch.device("cpu"), torch.float32)
    eager, graphs = (make_engine(model=parts.model, link=parts.link(), capture=capture) for capture in (None, record))
    graphs.prepare()
    assert tokens(graphs) == tokens(eager)
    assert graphs.stats().graph_steps == graphs.stats().steps > 0


def test_a_new_key_is_captured_once_after_a_step_without(tiny: Any, make_engine: MakeEngine) -> None:
    link = keyed(tiny)
    engine = make_engine(link=link, capture=record, max_num_batched_tokens=1)
    engine.prepare()
    assert (link.captured, engine.stats().graphs) == (2, 2), "of a decode, and of a piece"
    for key, captured in (("two", 4), ("one", 4), ("two", 4), (None, 4)):
        link.key = key
        before = engine.stats().graph_steps
        assert tokens(engine, PROMPTS[:1]) == [tiny.greedy(PROMPTS[0], 9)]
        assert engine.stats().graphs == captured
        assert (engine.stats().graph_steps > before) == (key is not None)
    assert link.captured == 4


class Narrow(Keyed):
    """Exchanges of more than 16 rows cannot be captured."""

    @contextmanager
    def capture_context(self, rows: int) -> Iterator[Hashable | None]:
        yield self.key if rows <= 16 else None


def test_where_the_host_exchanges_rows_no_step_is_launched_ahead(tiny: Any, make_engine: MakeEngine) -> None:
    """A prompt of forty tokens comes while another sequence decodes by graph: it is computed in one step, which is
    launched when nobody waits for a token of the step before."""
    link = Narrow(tiny.link()._experts, num_experts=8)
    engine = make_engine(link=link, capture=record, lookahead="replayed", max_model_len=64, kv_blocks=64)
    engine.prepare()
    assert engine._runner.replayed_rows == 16
    engine.add(request("old", PROMPTS[0], 12))
    for _ in range(3):
        engine.step()
    assert engine._steps.in_flight
    engine.add(request("long", [7] * 40, 1))
    seen = []
    while engine.has_work:
        before = engine.stats()
        engine.step()
        after = engine.stats()
        seen.append((after.step_tokens, after.graph_steps > before.graph_steps, engine._steps.in_flight))
    assert seen[0][0] == 1
    assert not seen[0][2], "what follows is not for graphs"
    assert seen[1] == (41, False, False), "whole, and read before anything follows"
    assert engine.stats().prefill_chunks == 0


def test_links_without_a_key_have_no_graphs(make_engine: MakeEngine, tiny: Any) -> None:
    link = keyed(tiny)
    link.key = None
    engine = make_engine(link=link, capture=record)
    engine.prepare()
    assert tokens(engine, PROMPTS[:1]) == [tiny.greedy(PROMPTS[0], 9)]
    assert (engine.stats().graphs, engine.stats().graph_steps) == (0, 0)


def test_a_step_that_failed_replays_the_same_graph(tiny: Any, make_engine: MakeEngine) -> None:
    link = keyed(tiny)
    engine = make_engine(link=link, capture=record)
    engine.prepare()
    captured = engine.stats().graphs
    link.failing = frozenset(range(100))
    assert tokens(engine) == [tiny.greedy(prompt, 9) for prompt in PROMPTS]
    assert engine.stats().graphs == captured
    assert engine.stats().graph_steps == 2 * engine.stats().steps


def test_larger_steps_than_any_graph_run_without(monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine) -> None:
    monkeypatch.setattr("services.attention.step.cuda_graphs.MAX_ROWS", 2)
    engine = make_engine(capture=record)
    engine.prepare()
    assert engine.stats().graphs == 3, "of one and two decodes, and of two rows"
    tokens(engine)
    assert engine.stats().graph_steps == 0


def test_what_a_replay_returned_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(capture=record)
    engine.prepare()
    seen = []
    replayed = engine._graphs.replayed  # type: ignore[union-attr]

    def watched(micro_batches: Any) -> Any:
        x_TD = replayed(micro_batches)
        if x_TD is not None:
            seen.append((x_TD, x_TD.clone()))
        return x_TD

    engine._graphs.replayed = watched  # type: ignore[union-attr,method-assign]
    tokens(engine)
    assert len(seen) > 2
    assert all(torch.equal(now, then) for now, then in seen)


def test_no_memory_for_graphs_is_an_error_at_the_start(make_engine: MakeEngine) -> None:
    def full(_work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA out of memory\nand so on")

    with pytest.raises(ConfigError, match=r"600 rows cannot be captured as a CUDA graph: CUDA out of memory\. Start"):
        make_engine(capture=full, max_num_batched_tokens=600).prepare()


def test_a_device_that_cannot_capture_computes_eagerly(
    tiny: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """From the size on that it cannot; what was captured before is used."""
    captured: list[Callable[[], None]] = []

    def limited(work: Callable[[], None]) -> Callable[[], None]:
        if len(captured) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        captured.append(record(work))
        return captured[-1]

    engine = make_engine(capture=limited)
    engine.prepare()
    assert "as a CUDA graph; no new graphs will be captured" in caplog.text
    assert tokens(engine, PROMPTS[:2]) == [tiny.greedy(prompt, 9) for prompt in PROMPTS[:2]]
    stats = engine.stats()
    assert (stats.graphs, stats.graph_failures) == (2, 1)
    assert stats.graph_steps < stats.steps


def test_no_memory_later_leaves_the_steps_as_they_are(
    tiny: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def full(_work: Callable[[], None]) -> Callable[[], None]:
        calls.append(1)
        raise RuntimeError("CUDA out of memory")

    engine = make_engine(capture=full)
    assert tokens(engine, PROMPTS[:2]) == [tiny.greedy(prompt, 9) for prompt in PROMPTS[:2]]
    assert len(calls) == 1
    assert "as a CUDA graph; no new graphs will be captured" in caplog.text


def test_buckets_waste_a_third_at_most() -> None:
    sizes = row_buckets(512)
    assert sizes == sorted(set(sizes))
    assert all(rows <= 16 or 3 * rows >= 2 * next(size for size in sizes if size >= rows) for rows in range(1, 513))
    assert [row_buckets(most)[-1] for most in (1, 2, 3, 50, 512)] == [1, 2, 3, 50, 512]


def test_pocket_answers() -> None:
    """The recorded ones, by graph."""
    records = [json.loads(line) for line in (POCKET / "records/greedy.jsonl").read_text().splitlines()[:6]]
    parts = load(POCKET / "model", torch.device("cpu"), torch.float32)
    engine = parts.engine(record, max_num_seqs=8, max_num_batched_tokens=64, kv_blocks=64, max_model_len=128)
    engine.prepare()
    requests = [request(one["id"], one["prompt_ids"], 12, ignore_eos=False) for one in records]
    found = run(engine, requests)
    for one in records:
        wanted = [token for token in one["output_ids"][:12] if token]
        assert [token for token in found.tokens[one["id"]] if token] == wanted
    assert found.graph_steps >= 10
