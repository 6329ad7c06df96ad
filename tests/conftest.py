"""What every test gets: an environment without our variables, one torch thread, interpreted Triton kernels, the same
random numbers, and on request a private Redis or hosts of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings
from testkit import lanes
from testkit.processes import background
from testkit.processes.iproute import obstacle
from testkit.processes.netns import Network, open_network

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores are all there is; read when torch is first imported
os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU is needed; read when triton is first imported

# How long an example takes says how busy the machine is, not whether the property holds. What else is set, stays.
settings.register_profile("tests", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Adds what every run does: it chooses tests by lanes, and fails them for what fails in the background."""
    for plugin in (lanes, background):
        config.pluginmanager.register(plugin)


@contextmanager
def _kept_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def _environment_of_a_module() -> Iterator[None]:
    with _kept_environment():
        yield


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """None of our variables; and what a test, or a program that it calls, sets reaches no test that comes after it."""
    with _kept_environment():
        for name in list(os.environ):
            if name.upper().startswith("EXPERTMESH_"):
                del os.environ[name]
        yield


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws from torch without a generator of its own is the same each time, whichever ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture
async def redis_url() -> AsyncIterator[str]:
    """URL of an empty redis-server that lives as long as the test."""
    from services.queue.embedded import EmbeddedRedis

    async with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch to plug hosts into; see :mod:`testkit.processes.netns`. Skips where the machine does not allow it."""
    if (reason := obstacle()) is not None:
        pytest.skip(f"hosts as network namespaces: {reason}")
    with open_network() as switch:
        yield switch
