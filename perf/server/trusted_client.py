"""One server, measured by the client of this project and by one that others trust, side by side.

    python -m perf.server.trusted_client http://127.0.0.1:8000 --tokenizer MODEL_FOLDER
        [--client guidellm|vllm] [--tool COMMAND] [--rates 4 8 inf] [--rounds 3] [--out DIR]

Both clients send the same number of requests with prompts and answers of the same lengths, at the same rates (inf: all
at once), in turns. The table has the median of the rounds; a * marks figures whose rounds do not overlap between the
clients. OUT gets trusted_client.json with every run, and what the other client wrote. It starts no server. Exit code 2:
the tool is not there or failed, or the server refuses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loadgen import common_load, other_clients
from loadgen.common_load import Arrivals, Figures, Load
from loadgen.drive import Progress, Report
from loadgen.errors import LoadError
from loadgen.other_clients import CLIENTS, OtherClient, OtherClientError, command
from loadgen.preflight import find_server

OURS = "loadgen"
WARM_UP = 8
"""Requests, with the lengths of those that are measured."""
SHOWN = {
    "failed": "failed requests",
    "requests_s": "requests/s",
    "output_tokens_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
}
Say = Callable[[str], None]


class ServerRefused(Exception):
    """The server does not answer its requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What ``client`` measured of ``server`` in one round. ``rate`` is None for all at once."""

    server: str
    client: str
    rate: float | None
    round: int
    figures: Figures


def measure(
    load: Load,
    options: argparse.Namespace,
    other: OtherClient,
    words: list[str],
    say: Say,
    *,
    server: str,
) -> Iterator[Run]:
    """Let both clients send ``load`` at the rates of ``options``, in turns, and yield what each measured. ``words``
    start the other one; ``server`` is what the runs call the server.

    Raises:
        ServerRefused: it does not answer the requests that warm it up.
        OtherClientError: the other client gave no figures.
    """
    warm = common_load.send(replace(load, rate=None, requests=WARM_UP, seed=-1))
    if warm.failed:
        raise ServerRefused(f"{load.url} refused {warm.failed} of {WARM_UP} requests, the first with: {warm.error}")
    for number, (turn, rate) in enumerate(itertools.product(range(1, options.rounds + 1), options.rates)):
        for side, client in enumerate((OURS, other.name)):
            say(f"{_rate(rate)}, round {turn}, {client}")
            aimed = replace(load, rate=rate, seed=2 * number + side)
            if client == OURS:
                figures = common_load.send(aimed, _counting(load.requests, say))
            else:
                folder = options.out / server / f"{client}-{rate or 'at-once'}-{turn}"
                figures = other_clients.send(other, words, aimed, folder, _timing(say))
            say(f"  {_line(figures)}")
            yield Run(server=server, client=client, rate=rate, round=turn, figures=figures)


def _counting(requests: int, say: Say) -> Report:
    """Returns what says every tenth of the requests."""
    said = 0

    def report(progress: Progress) -> None:
        nonlocal said
        if (tenths := 10 * progress.ended // requests) > said:
            said = tenths
            say(f"  {progress.ended} of {requests} have ended")

    return report


def _timing(say: Say) -> Callable[[float], None]:
    return lambda seconds: say(f"  it has run for {seconds:.0f} s")


def _rate(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:g}/s"


def _line(figures: Figures) -> str:
    failed = f", {figures.failed} FAILED ({figures.error or 'see its output'})" if figures.failed else ""
    lag = "" if figures.lag_p99_ms is None else f", sent at most {figures.lag_p99_ms:.1f} ms late (p99)"
    return f"{figures.completed} requests, {figures.requests_s:.2f} a second{lag}{failed}"


def table(sides: Mapping[str, Sequence[Run]]) -> str:
    """Returns the medians of two groups of runs side by side, in Markdown, and by how much the second differs."""
    lines = [f"| arrivals | figure | {' | '.join(sides)} | difference |", "| --- | --- | --- | --- | --- |"]
    for rate in dict.fromkeys(run.rate for runs in sides.values() for run in runs):
        for field, name in SHOWN.items():
            values = [_values(runs, rate, field) for runs in sides.values()]
            cells = [f"{statistics.median(found):.4g}" if found else "-" for found in values]
            lines.append(f"| {_rate(rate)} | {name} | {' | '.join(cells)} | {difference(*values)} |")
    return "\n".join(lines)


def _values(runs: Sequence[Run], rate: float | None, field: str) -> list[float]:
    found = (getattr(run.figures, field) for run in runs if run.rate == rate)
    return [value for value in found if value is not None]


def difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Returns by how much the median of ``second`` exceeds that of ``first``, with a * where no rounds overlap.

    >>> difference([10.0, 11.0], [12.6, 12.6]), difference([10.0, 12.0], [11.0, 12.1]), difference([1.0], [])
    ('+20.0 % *', '+5.0 %', '-')
    """
    if not first or not second or not (base := statistics.median(first)):
        return "-"
    apart = len(first) > 1 and (max(first) < min(second) or max(second) < min(first))
    return f"{statistics.median(second) / base - 1:+.1%}".replace("%", " %") + (" *" if apart else "")


def arguments() -> argparse.ArgumentParser:
    """Returns a parser of the options about the load and the other client."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--client", choices=CLIENTS, default="guidellm", help="the other client (default: %(default)s)")
    parser.add_argument("--tool", metavar="COMMAND", help="what starts it (default: its name)")
    parser.add_argument("--rates", type=_positive_rate, nargs="+", default=[4.0, 8.0, None], help="a second, or inf")
    parser.add_argument("--arrivals", type=Arrivals, choices=list(Arrivals), default=Arrivals.POISSON)
    parser.add_argument("--requests", type=int, default=200, help="for each run (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(".cache/trusted-client"))
    return parser


def _positive_rate(text: str) -> float | None:
    rate = float(text)
    if not rate > 0:
        raise ValueError(text)
    return None if math.isinf(rate) else rate


def load_of(options: argparse.Namespace, *, url: str, model: str, tokenizer: str) -> Load:
    """Returns the load that ``options`` describe, at no rate yet."""
    return Load(
        url=url,
        model=model,
        tokenizer=tokenizer,
        rate=None,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        arrivals=options.arrivals,
    )


def clock() -> Say:
    """Returns what prints a line with the seconds since now."""
    began = time.perf_counter()
    return lambda text: print(f"{time.perf_counter() - began:7.1f} s  {text}", flush=True)


def write(path: Path, load: Load, runs: Sequence[Run]) -> None:
    """Writes the load and all ``runs`` to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"load": asdict(load), "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.server.trusted_client",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[arguments()],
    )
    parser.add_argument("url")
    parser.add_argument("--model", help="its name in the API (default: the one that is served)")
    parser.add_argument("--tokenizer", required=True, help="its folder, or its name on a hub")
    options = parser.parse_args(argv)
    other, url = CLIENTS[options.client], options.url.rstrip("/")
    try:
        words = command(other, options.tool)
        load = load_of(
            options, url=url, model=find_server(url, options.model, None, None).model, tokenizer=options.tokenizer
        )
        runs = list(measure(load, options, other, words, clock(), server="server"))
    except (LoadError, OtherClientError, ServerRefused) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n" + table({name: [run for run in runs if run.client == name] for name in (OURS, other.name)}))
    write(options.out / "trusted_client.json", load, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
