"""On a GPU: two events in a captured graph show how long one exchange of it took, each time that it is launched."""

from __future__ import annotations

import pytest
import torch

from services.fabric.shared_memory.busy_time import GraphWatch

EXCHANGES = 4
CYCLES = 2_000_000
"""About a millisecond."""


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_middle_of_a_graph_stands_for_all_of_it() -> None:
    watch, graph, stream = GraphWatch(EXCHANGES), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        torch.cuda._sleep(CYCLES)  # loaded before the capture
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for exchange in range(EXCHANGES):
            torch.cuda._sleep(10 * CYCLES)  # the wait for rows
            with watch.around(exchange):
                torch.cuda._sleep(CYCLES)
        graph.capture_end()
        for _ in range(2):
            graph.replay()
            early = watch.read()
            stream.synchronize()
            whole = watch.read()
            assert early in (0.0, whole)
            assert 0 < whole / EXCHANGES < 0.01, "without the waits"
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.cuda._sleep(CYCLES)
        ended.record()
        stream.synchronize()
        assert whole / EXCHANGES == pytest.approx(began.elapsed_time(ended) / 1e3, rel=0.5)
