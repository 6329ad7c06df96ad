"""The loss curve of a run: lines of ``loss.csv``, and of progress for whoever watches."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from pocket_moe.train.loop import Stats

COLUMNS = ("step", "tokens", "lr", "loss", "balance", "peak", "gradient_norm", "tokens_per_second", "heldout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``loss`` and the like are means since the last line; ``heldout`` has nats by domain, "" for all of them."""

    step: int
    tokens: int
    lr: float
    stats: Stats
    tokens_per_second: float
    steps_left: int
    seconds_per_step: float
    heldout: dict[str, float] | None


class Curve:
    """Appends to ``path``; lines after step ``keep`` are dropped first, since the run goes on from there. There is a
    line of that step, so each line stands for all steps since the one before it."""

    def __init__(self, path: Path, domains: list[str], *, keep: int) -> None:
        self._path, self._domains = path, domains
        path.parent.mkdir(parents=True, exist_ok=True)
        header = [*COLUMNS, *(f"heldout_{domain}" for domain in domains)]
        kept = [row for row in _rows(path) if int(row["step"]) <= keep]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, header, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

    def add(self, line: Line) -> None:
        heldout = line.heldout or {}
        values = [heldout.get(domain) for domain in ("", *self._domains)]
        stats = line.stats
        numbers = [line.lr, stats.loss, stats.balance, stats.peak, stats.gradient_norm]
        cells = [line.step, line.tokens, *(f"{number:.6g}" for number in numbers), round(line.tokens_per_second)]
        cells += ["" if value is None else f"{value:.5f}" for value in values]
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)
        print(_progress(line), flush=True)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _progress(line: Line) -> str:
    minutes, seconds = divmod(round(line.steps_left * line.seconds_per_step), 60)
    text = (
        f"step {line.step} loss {line.stats.loss:.4f} balance {line.stats.balance:.3f} peak {line.stats.peak:.2f} "
        f"lr {line.lr:.2e} {line.tokens_per_second / 1000:.0f}k tokens/s, {minutes}:{seconds:02d} left"
    )
    return text if line.heldout is None else f"{text}, held out {line.heldout['']:.4f}"
