"""``moe_kernels`` where triton is not installed: it imports, and every op runs on CPU tensors."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # every import of it raises
import torch
import moe_kernels as mk
x, w_in, w_down = torch.ones(1, 16), torch.ones(1, 32, 16) / 16, torch.ones(1, 16, 16) / 16
ids, weights = mk.route(torch.zeros(1, 1), top_k=1)
quantised = [mk.quantize_experts(weight, 8, 0) for weight in (w_in, w_down)]
counts = torch.ones(1, dtype=torch.int32)
for y in (
    mk.fused_moe(x, w_in, w_down, ids, weights),
    mk.fused_moe(x, w_in, w_down, ids, weights, plan=mk.plan(ids, 1)),
    mk.fused_moe(x, *quantised, ids, weights),
    mk.grouped_mlp(x, counts, w_in, w_down),
    mk.parallel_linear(x, w_down, mk.plan(ids, 1)) * 0.7311,
):
    print(f"{y[0, 0].item():.3f}")
"""


def test_every_op_runs() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0.731"] * 5, done.stderr
