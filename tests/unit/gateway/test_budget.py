"""What one request may ask for: counted as the queue does, defaults that fit, refusals that name the field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import InvalidRequest
from services.gateway.budget import MAX_SCORES, Budget, Demand
from services.messages import GenerateRequest, SamplingParams

demands = st.builds(
    Demand,
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    n=st.integers(1, 5),
    logprobs=st.none() | st.integers(0, 20),
    echo=st.booleans(),
)


def requests(demand: Demand, max_tokens: int) -> list[GenerateRequest]:
    """The sequences of ``demand`` as they are admitted."""
    return [
        GenerateRequest(
            id="r",
            attempt=1,
            token_ids=[],
            prompt_len=length,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                logprobs=demand.logprobs,
                prompt_logprobs=demand.logprobs if demand.echo and draw == 0 else None,
            ),
            deadline_ms=0,
            priority=5,
            tenant="t",
            reply_to="g",
        )
        for length in demand.lengths
        for draw in range(demand.n)
    ]


@given(demands, st.integers(0, 3000))
def test_it_counts_as_the_queue_does(demand: Demand, max_tokens: int) -> None:
    sequences = requests(demand, max_tokens)
    assert demand.cost(max_tokens) == sum(request.cost for request in sequences)
    assert demand.scores(max_tokens) == sum(r.sampling.scores(r.prompt_len) for r in sequences)


@given(demands, st.integers(1, 2000), st.integers(1, 400_000), st.integers(0, 200_000))
def test_a_default_is_the_longest_that_fits(demand: Demand, room: int, tokens: int, scores: int) -> None:
    budget = Budget(tokens=tokens, scores=scores)
    most = budget.largest_max_tokens(demand, room)
    assert 1 <= most <= room
    assert most == room or not budget.fits(demand, most + 1)
    assert most == 1 or budget.fits(demand, most)


@pytest.mark.parametrize(
    ("demand", "max_tokens", "param"),
    [
        (Demand(lengths=[1000], n=128, logprobs=20, echo=True), 2000, "logprobs"),
        (Demand(lengths=[100_000] * 5, n=128, logprobs=None, echo=False), 1, "max_tokens"),
        (Demand(lengths=[10], n=1, logprobs=0, echo=False), MAX_SCORES + 1, "logprobs"),
    ],
)
def test_what_could_never_be_served_is_refused_by_name(demand: Demand, max_tokens: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Budget(tokens=4_000_000).check(demand, max_tokens)
    assert refused.value.param == param


def test_usual_requests_pass() -> None:
    budget = Budget(tokens=4_000_000)
    budget.check(Demand(lengths=[131_000], n=1, logprobs=20, echo=True), 16)
    budget.check(Demand(lengths=[1000] * 100, n=1, logprobs=5, echo=True), 100)
    budget.check(Demand(lengths=[100], n=1, logprobs=20, echo=False), 131_000)
