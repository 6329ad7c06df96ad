"""Single-expert placement on the pocket model's recorded choices, against EPLB's greedy; minutes on a CPU.

    PYTHONPATH=.:tests:examples/pocket-moe .venv/bin/python perf/fabric/placement_replay.py

Each planner sees the load of one window (ours and the helped greedy of three more before it) and is judged on the next.
``max/mean`` is the mean over the windows judged of the sum over layers of the most loaded device's load, over the mean
device's; replicas of an expert share its load evenly. ``loads`` counts experts that a device had to load.
"""

from __future__ import annotations

from pathlib import Path

from testkit.fabric.placement_replay import Planner, first_only, greedy, helped_greedy, ours, replay, shifting, steady

from pocket_moe.records import ExpertTrace

TRACE = Path(__file__).resolve().parents[2] / "examples/pocket-moe/records/experts.npz"
DEVICES_SLOTS = ((4, 5), (4, 6), (8, 3), (8, 4))
MIN_TOKENS = 5000


def main() -> None:
    trace = ExpertTrace.load(TRACE)
    sizes = [int((trace.domain == number).sum()) for number in range(len(trace.domains))]
    domains = [number for number, size in enumerate(sizes) if size >= MIN_TOKENS]
    scenarios = {
        "domain to domain, in 4 steps": shifting(trace, domains, tokens=2500, steps=4),
        "domain to domain, abruptly": shifting(trace, domains * 2, tokens=2500, steps=1),
        "between two domains": shifting(trace, domains[:2] * 20, tokens=2500, steps=1),
        "all domains, steady": steady(trace, domains, tokens=5000, windows=30),
    }
    print(f"{'load':30} devices x slots  planner           max/mean  worst  loads")
    for name, windows in scenarios.items():
        for devices, slots in DEVICES_SLOTS:
            for planner, plan in _planners(devices, slots).items():
                score = replay(windows, plan, devices)
                print(
                    f"{name:30} {devices} x {slots}            {planner:16} {score.imbalance:9.3f} {score.worst:6.3f} "
                    f"{score.moves:6}",
                    flush=True,
                )


def _planners(devices: int, slots: int) -> dict[str, Planner]:
    return {
        "first window's": first_only(devices, slots),
        "EPLB's greedy": greedy(devices, slots),
        "the same, helped": helped_greedy(devices, slots),
        "one window": ours(devices, slots, earlier=0),
        "place_experts": ours(devices, slots),
    }


if __name__ == "__main__":
    main()
