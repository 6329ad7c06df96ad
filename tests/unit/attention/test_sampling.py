"""The sampler against a slow sampler that does one row in Python, and the independence of rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.histories import history_of

from services.attention.sampling.filters import heads, thresholds, width
from services.attention.sampling.logprobs import TokenScores
from services.attention.sampling.noise import GumbelNoise
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import Outcome
from services.attention.sequences.sequence import DrawRow, draw_keys, sequence_key
from services.messages import SamplingParams

CPU = torch.device("cpu")
V = 23


def row(
    tokens: tuple[int, ...] = (1, 2, 3), prompt_len: int = 2, stop: frozenset[int] = frozenset(), **params: Any
) -> DrawRow:
    return DrawRow(
        params=SamplingParams(**{"max_tokens": 9, **params}), token_ids=tokens, prompt_len=prompt_len, stop_ids=stop
    )


def drawn(sampler: Sampler, logits_RV: torch.Tensor, rows: list[DrawRow]) -> list[Outcome]:
    return sampler.draw(logits_RV, rows, history_of(rows)).redrawn().outcomes()


def floors(scaled_SV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """With ever wider heads, until they decide."""
    widths = heads(scaled_SV.shape[1])
    while True:
        floors_S, decided_S = thresholds(scaled_SV, params, [width(row, widths) for row in params])
        if decided_S is None or bool(decided_S.all()):
            return floors_S
        widths = widths[1:]


def random_logits(rows: int, seed: int = 0, vocab_size: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def kept_by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """Tokens that top_k, top_p and min_p leave, by their definitions; ``logits`` are distinct."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weights = {token: math.exp(logits[token] - logits[order[0]]) for token in order}
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if kept and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return {token for token in kept if weights[token] >= params.min_p}


def draw_by_definition(logits: list[float], asked: DrawRow) -> int:
    params, edited = asked.params, list(logits)
    generated = Counter(asked.token_ids[asked.prompt_len :])
    for token in set(asked.token_ids):
        factor = params.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token, count in generated.items():
        edited[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    if asked.generated(0) < params.min_tokens:
        for token in asked.stop_ids:
            edited[token] = -math.inf
    if params.temperature == 0:
        return max(range(len(edited)), key=lambda token: (edited[token], -token))
    scaled = [value / params.temperature for value in edited]
    keys = draw_keys([sequence_key(params.seed, params.choice)], [len(asked.token_ids)])
    noise = GumbelNoise(len(logits), CPU).rows(keys)[0]
    return max(kept_by_definition(scaled, params), key=lambda token: scaled[token] + float(noise[token]))


same_examples = settings(max_examples=200, deadline=None, derandomize=True)
"""Two computations that differ in their last bits may draw two tokens where scores nearly tie: not left to chance."""
sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, V, 2 * V]),
        "top_p": st.sampled_from([0.0, 0.2, 0.7, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.8]),
        "frequency_penalty": st.sampled_from([0.0, -0.6]),
        "logit_bias": st.sampled_from([{}, {4: 5.0, 7: -100.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "seed": st.integers(0, 2**64 - 1),
        "choice": st.integers(0, 3),
    }
)


@same_examples
@given(params=st.lists(sampling, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_batch_draws_what_each_row_draws_by_definition(params: list[dict[str, Any]], seed: int) -> None:
    logits_RV = random_logits(len(params), seed)
    before = logits_RV.clone()
    rows = [row((1, 2, 3, 3, 5), stop=frozenset({0, 9}), **each) for each in params]
    outcomes = drawn(Sampler(V, CPU), logits_RV, rows)
    wanted = [
        draw_by_definition(values.double().tolist(), asked) for values, asked in zip(logits_RV, rows, strict=True)
    ]
    assert [outcome.token_id for outcome in outcomes] == wanted
    assert torch.equal(logits_RV, before), "the caller's logits were written to"


@same_examples
@given(params=st.lists(sampling, min_size=1, max_size=6), seed=st.integers(0, 1000), last=st.integers(0, V - 1))
def test_a_token_that_only_the_device_knows_counts_like_the_others(
    params: list[dict[str, Any]], seed: int, last: int
) -> None:
    """``min_tokens`` 4 bans ends for a row of three generated tokens and not of four."""
    logits_RV, stop = random_logits(len(params), seed), frozenset({0, 9})
    logits_RV[:, 9] += 4.0
    for known in ((1, 2, 3, 3), (1, 2, 3, 3, 5), (1, 2)):
        whole = [row((*known, last), stop=stop, **each) for each in params]
        short = [row(known, stop=stop, **each) for each in params]
        for ahead in (len(short), len(short) // 2):  # the rows after these know all their tokens
            rows = [*short[:ahead], *whole[ahead:]]
            found = Sampler(V, CPU).draw(logits_RV, rows, history_of(whole), ahead=ahead)
            assert found.outcomes() == drawn(Sampler(V, CPU), logits_RV, whole)


def test_ends_are_banned_from_rows_that_are_not_ahead() -> None:
    """Both know three generated tokens of at least four; the device knows one more of the first row."""
    logits_RV, stop = random_logits(2, 0), frozenset({9})
    logits_RV[:, 9] += 100.0
    rows = [row((1, 2, 3, 3), prompt_len=1, stop=stop, min_tokens=4, temperature=0.0) for _ in range(2)]
    first, second = Sampler(V, CPU).draw(logits_RV, rows, ahead=1).outcomes()
    assert first.token_id == 9
    assert second.token_id != 9


@pytest.mark.parametrize("vocab_size", [V, 3001])
def test_a_draw_does_not_depend_on_the_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(24, vocab_size, generator=generator)
    choices: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 700, "top_p": 0.99},
        {},
        {"min_p": 0.05, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 20},
    ]
    rows = [row((1, 2, 3 + index % 5), seed=index, **choices[index % len(choices)]) for index in range(24)]
    sampler = Sampler(vocab_size, CPU)
    together = drawn(sampler, logits_RV, rows)
    alone = [drawn(sampler, logits_RV[i : i + 1], [rows[i]])[0] for i in range(24)]
    shuffled = [23 - i for i in range(24)]
    backwards = drawn(sampler, logits_RV[shuffled], [rows[i] for i in shuffled])
    assert together == alone == backwards[::-1]


@pytest.mark.parametrize("vocab_size", [300, 3000, 20_000, 140_000])
def test_wide_filters_equal_a_full_sort(vocab_size: int) -> None:
    """Rows that the head of the vocabulary does not decide."""
    scaled_SV = random_logits(6, vocab_size=vocab_size) / 3
    scaled_SV -= scaled_SV.amax(-1, keepdim=True)
    params = [
        SamplingParams(max_tokens=1, top_p=0.999),
        SamplingParams(max_tokens=1, top_k=280),
        SamplingParams(max_tokens=1, top_k=280, top_p=0.95),
        SamplingParams(max_tokens=1, top_k=5000, top_p=0.99),
        SamplingParams(max_tokens=1, top_k=vocab_size, min_p=0.01),
        SamplingParams(max_tokens=1, top_k=vocab_size),
    ]
    floors_S = floors(scaled_SV, params)
    for values, floor, asked in zip(scaled_SV, floors_S, params, strict=True):
        kept = kept_by_definition(values.double().tolist(), asked)
        assert set((values >= floor).nonzero()[:, 0].tolist()) == kept


def test_ties_at_the_border_are_kept_together() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    floor = floors(scaled, [SamplingParams(max_tokens=1, top_k=2)])
    assert (scaled[0] >= floor[0]).tolist() == [True, True, True, True, False]


def test_top_p_stops_where_the_mass_is_reached_exactly() -> None:
    scaled = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() - math.log(0.5)
    assert float(floors(scaled, [SamplingParams(max_tokens=1, top_p=0.75)])) == float(scaled[0, 1])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits_RV = torch.zeros(2, 5000)
    logits_RV[0, [17, 4000]] = 1.0
    outcomes = drawn(Sampler(5000, CPU), logits_RV, [row(temperature=0.0), row(temperature=0.0)])
    assert [outcome.token_id for outcome in outcomes] == [17, 0]


@pytest.mark.parametrize("temperature", [1e-60, 1e-45, 1e-30, 1e-9, 1e-5])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature: float) -> None:
    logits_RV = random_logits(8) * 1e4
    outcomes = drawn(Sampler(V, CPU), logits_RV, [row(temperature=temperature, seed=s) for s in range(8)])
    assert [outcome.token_id for outcome in outcomes] == logits_RV.argmax(-1).tolist()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone(broken: float, temperature: float) -> None:
    logits_RV = random_logits(3)
    rows = [row(temperature=temperature, seed=s, logprobs=1) for s in range(3)]
    sampler = Sampler(V, CPU)
    healthy = drawn(sampler, logits_RV, rows)
    logits_RV[1, 4] = broken
    outcomes = drawn(sampler, logits_RV, rows)
    assert outcomes[1].token_id is None
    assert outcomes[1].error is not None
    assert outcomes[1].error.code == "internal_error"
    assert [outcomes[0], outcomes[2]] == [healthy[0], healthy[2]]


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits_RV = torch.zeros(2, V)
    logits_RV[:, 0] = 50.0
    stop = frozenset({0, V + 5})
    rows = [row((1, 2, 3), stop=stop, min_tokens=n, temperature=1.0) for n in (1, 2)]
    first, second = drawn(Sampler(V, CPU), logits_RV, rows)
    assert first.token_id == 0
    assert second.token_id != 0


def test_logprobs_are_the_models_own() -> None:
    logits_RV = random_logits(2)
    asked = [row(temperature=0.7, top_k=1, logit_bias={3: 100.0}, logprobs=2), row(temperature=0.0)]
    first, second = drawn(Sampler(V, CPU), logits_RV, asked)
    wanted = logits_RV[0].log_softmax(0)
    assert first.token_id == 3
    assert first.logprob is not None
    assert first.logprob.logprob == pytest.approx(float(wanted[3]), abs=1e-6)
    assert [token for token, _ in first.logprob.top] == wanted.topk(2).indices.tolist()
    assert second.logprob is None


def test_equal_alternatives_are_listed_by_id() -> None:
    (score,) = TokenScores(torch.zeros(1, 4), torch.tensor([2]), [4]).read()
    assert [token for token, _ in score.top] == [0, 1, 2, 3]
    assert score.logprob == pytest.approx(-math.log(4))


def test_draws_at_a_temperature_follow_the_filtered_softmax() -> None:
    logits_V = torch.linspace(-2, 2, V)
    rows = [row(tokens=(1,) * position, prompt_len=1, seed=3, temperature=0.8, top_k=6) for position in range(1, 4001)]
    outcomes = drawn(Sampler(V, CPU), logits_V.expand(4000, V), rows)
    counts = torch.bincount(torch.tensor([outcome.token_id for outcome in outcomes]), minlength=V)
    assert counts[:-6].sum() == 0
    expected = (logits_V[-6:] / 0.8).softmax(0) * 4000
    assert float(((counts[-6:] - expected) ** 2 / expected).sum()) < 25.7  # 99.99 % point for 5 degrees of freedom
