"""``python -m chaos.drill``: faults of a bad night, each on a deployment that Prometheus watches by the shipped rules.
Says which alerts fired after how long, and draws the dashboards of each fault into a folder.

Some faults are cured as the runbook of their alert says, while their load goes on. Exit code 1: an alert that a fault
is known for did not fire in time, or went on firing after the cure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.drill_faults import DRILLS, Drill
from chaos.night import RELEASE, Night, deployed

CALM_S = 45.0
"""Before a fault, and after it at least."""
CALM_LIMIT_S = 300.0
CURE_LIMIT_S = 300.0
"""For a cure and the end of its alerts, while the load goes on."""
QUIET_S = 30.0
"""For so long no alert fires once it counts as ended."""
_LOOK_S = 1.0


@dataclass(kw_only=True, slots=True)
class Seen:
    """Alerts since the fault: after how many seconds each was pending, and was firing."""

    quiet: frozenset[str]
    """Alerts that were there before the fault, which do not count."""
    began: float = field(default_factory=time.time)
    pending: dict[str, float] = field(default_factory=dict)
    firing: dict[str, float] = field(default_factory=dict)

    def look(self, night: Night) -> None:
        for name, state in night.alerts().items():
            for seen in (self.pending,) if state == "pending" else (self.pending, self.firing):
                if name not in seen and name not in self.quiet:
                    seen[name] = self.since_s
                    night.say(f"  {name} is {state}")

    @property
    def since_s(self) -> float:
        return round(time.time() - self.began, 1)


async def hold(night: Night, drill: Drill, pictures: Path | None) -> dict[str, Any]:
    """Make the fault, wait for its alerts, cure it, and end it. Returns what happened, in seconds."""
    quiet = frozenset(night.alerts())
    night.say(f"{drill.name}: {_said(drill.fault)}")
    async with drill.fault(night):
        seen = Seen(quiet=quiet)
        while seen.since_s < drill.limit_s and not (drill.awaited and set(drill.awaited) <= set(seen.firing)):
            await asyncio.sleep(_LOOK_S)
            seen.look(night)
        cured = await _cured(night, drill) if drill.cure else {}
        lasted_s = seen.since_s
    ended_at = time.time()
    night.say(f"{drill.name} is over")
    await _calm(night, drill.awaited)
    if pictures is not None:
        await asyncio.to_thread(_draw, night, drill.name, pictures, seen.began - 60, time.time())
    return {
        "fault": drill.name,
        "what": _said(drill.fault),
        "began": seen.began,
        "lasted_s": lasted_s,
        "quiet_after_s": round(time.time() - ended_at, 1),
        "pending_s": seen.pending,
        "firing_s": seen.firing,
        "missed": sorted(set(drill.awaited) - set(seen.firing)),
    } | cured


async def _cured(night: Night, drill: Drill) -> dict[str, Any]:
    """Do what the runbook says, with the fault's load as before, until the alerts have ended and stay away."""
    assert drill.cure is not None
    began = gone_since = time.time()
    night.say(f"  cure: {_said(drill.cure)}")
    cure = asyncio.create_task(asyncio.to_thread(drill.cure, night))
    done_at: float | None = None
    while time.time() - began < CURE_LIMIT_S and (done_at is None or time.time() - max(gone_since, done_at) < QUIET_S):
        await asyncio.sleep(_LOOK_S)
        if set(drill.awaited) & set(night.alerts()):
            gone_since = time.time()
        if done_at is None and cure.done():
            done_at = time.time()
            night.say(f"  done after {done_at - began:.1f} s")
    await cure
    done_at = done_at or time.time()
    resolved = time.time() - gone_since >= QUIET_S
    resolved_s = round(gone_since - began, 1) if resolved else None
    night.say(f"  alerts ended after {resolved_s} s")
    return {"cure": _said(drill.cure), "cure_took_s": round(done_at - began, 1), "resolved_s": resolved_s}


def _said(what: Callable[..., object]) -> str:
    return " ".join((what.__doc__ or "").split())


async def _calm(night: Night, awaited: Sequence[str]) -> None:
    """Return when those of ``awaited`` have ended. Others may look back upon ten minutes."""
    await asyncio.sleep(CALM_S)
    until_s = time.time() + CALM_LIMIT_S
    while time.time() < until_s and set(awaited) & set(night.alerts()):
        await asyncio.sleep(_LOOK_S)


def _draw(night: Night, name: str, folder: Path, began: float, finished: float) -> None:
    words = [
        "--prometheus",
        night.prometheus.url,
        "--var",
        f"release={RELEASE}",
        "--from",
        f"{began:.0f}",
        "--to",
        f"{finished:.0f}",
    ]
    command = [sys.executable, "-m", "services", "dashboards", *words, "--out", str(folder / name)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)


async def run(night: Night, drill: Drill, pictures: Path | None) -> dict[str, Any]:
    """One of the drills, beside the steady tenant's requests."""
    async with night.steady.sending(streams=3, prompt_tokens=(8, 64), output_tokens=(8, 32)):
        await asyncio.sleep(CALM_S)
        return await hold(night, drill, pictures)


def held(drill: Drill, pictures: Path | None) -> dict[str, Any]:
    """The drill on a deployment of its own: what cured another fault would be there else."""
    with tempfile.TemporaryDirectory(prefix="expertmesh-drill-") as name, deployed(Path(name).resolve()) as night:
        return asyncio.run(run(night, drill, pictures))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    drills = [drill for drill in DRILLS if drill.name in (options.only or [each.name for each in DRILLS])]
    found = []
    for drill in drills:
        found.append(held(drill, options.pictures))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    for each in found:
        print(f"{each['fault']:16} {each['firing_s']} quiet {each['quiet_after_s']} s after its end")
    missed = [each["fault"] for each in found if each["missed"]]
    print(f"alerts did not fire: {missed}" if missed else "each alert that was due fired")
    ill = [each["fault"] for each in found if each.get("resolved_s", 0.0) is None]
    print(f"the cure did not end the alerts: {ill}" if ill else "each cure ended its alerts")
    return 1 if missed or ill else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos.drill", description="Which alerts fire at which fault, and when.")
    names = [drill.name for drill in DRILLS]
    parser.add_argument("--only", nargs="+", choices=names, help="these faults (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw the dashboards of each fault there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
