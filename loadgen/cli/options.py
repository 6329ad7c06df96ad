"""The options of ``expertmesh-load run``, ``search`` and ``sweep``, in groups as --help shows them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from loadgen.errors import BadSetting, LoadError
from loadgen.objectives import parse_objective
from loadgen.schedule.curve import RateCurve, parse_curve
from loadgen.schedule.gaps import parse_gaps
from loadgen.validity import parse_lag_limit
from loadgen.workload.hot_experts import parse_experts
from loadgen.workload.words import parse_lengths

WORKLOADS = ("lengths", "expertflow", "chat", "agents", "long", "trace", "file", "hot-experts")


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """A rate without an end."""


class Parser(argparse.ArgumentParser):
    """Ends with a typed error where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message[:1].upper()}{message[1:]}.", hint=f"`{self.prog} --help` lists the options.")


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns ``parse`` for argparse, with the text of a typed error in its message."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except LoadError as error:
            raise argparse.ArgumentTypeError(error.message.removesuffix(".")) from error

    return parsed


def number(least: float, *, whole: bool = False, above: bool = False) -> Callable[[str], Any]:
    """Returns a parser of numbers from ``least`` on, or ``above`` it."""

    def parsed(text: str) -> Any:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = None
        if value is None or not (value > least if above else value >= least):
            what = "a whole number" if whole else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {'above' if above else 'of at least'} {least:g}")
        return value

    return parsed


NOTICE_S = 10.0
COUNT, SECONDS = number(1, whole=True), number(0, above=True)


def share(text: str) -> float:
    """Returns a share: ``0.05``, or ``5%``."""
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 0.05 or 5%")
    return found


def confidence(text: str) -> float:
    """Returns a share that is neither nothing nor all: an interval that is surely right has no ends."""
    if not 0 < (found := share(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no confidence: write 0.95 or 95%")
    return found


def shard(text: str) -> tuple[int, int]:
    """Returns number and count: ``0/4``."""
    index, _, of = text.partition("/")
    if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: write 0/4 to 3/4")
    return int(index), int(of)


def start(text: str) -> Start:
    """Returns when a schedule begins: Unix seconds, or ``next:60`` for the next full minute of the clock."""
    every = text.startswith("next:")
    try:
        found = float(text.removeprefix("next:"))
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write Unix seconds, or next:60")
    return Start(found, every=every)


@dataclass(frozen=True, slots=True)
class Start:
    """A moment in Unix seconds; with ``every`` its next multiple that leaves :data:`NOTICE_S` to make requests."""

    seconds: float
    every: bool = False

    def at(self, now: float) -> float:
        """Returns the moment.

        >>> Start(60.0, every=True).at(1000.0), Start(60.0, every=True).at(1015.0), Start(5.0).at(1000.0)
        (1020.0, 1080.0, 5.0)
        """
        return self.seconds * math.ceil((now + NOTICE_S) / self.seconds) if self.every else self.seconds


def parser(command: str, about: str, *, schedule: bool) -> Parser:
    """Returns the parser of a command that sends loads; with ``schedule``, of one that sends a single one."""
    found = Parser(prog=f"expertmesh-load {command}", description=about)
    add_target(found)
    if schedule:
        add_schedule(found)
    else:
        group = found.add_argument_group("arrivals")
        group.add_argument("--gaps", type=typed(parse_gaps), default="poisson", help=GAPS)
        group.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    add_workload(found)
    add_clients(found)
    add_judgement(found)
    add_output(found)
    return found


GAPS = "constant, poisson, gamma:CV or erlang:K (default: %(default)s)"


def add_target(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("url", help="its address, without /v1")
    add("--model", help="default: the one that it serves")
    add("--endpoint", choices=("completions", "chat"), help="default: chat for chat and agents, else completions")
    add("--no-stream", action="store_false", dest="stream", help="ask for answers in one piece")
    add("--api-key-file", type=Path, metavar="FILE", help="default: the key in OPENAI_API_KEY, if it is set")
    add("--ca-file", type=Path, metavar="FILE", help="certificates to trust, for https")
    add("--wait", type=number(0), default=0.0, metavar="S", help="until it serves (default: %(default)s)")
    add("--warm-up", type=number(0, whole=True), default=1, metavar="N", help="requests before (default: %(default)s)")


def add_schedule(parser: Parser) -> None:
    group = parser.add_argument_group("schedule: one of --rate, --trace and --concurrency")
    add = group.add_argument
    rate = "a second: 100, inf (all at once), 10:30,50:30 (rate:seconds), 10..100:60 (ramp), day:MEAN:SECONDS:PEAK"
    add("--rate", type=_rate, metavar="CURVE", help=rate)
    add("--gaps", type=typed(parse_gaps), default="poisson", help=GAPS)
    add("--trace", type=Path, metavar="FILE", help="times and lengths of Mooncake, BurstGPT, or a CSV of minutes")
    add("--trace-from", type=number(0), default=0.0, metavar="S", help="second of the trace (default: %(default)s)")
    add("--trace-to", type=SECONDS, metavar="S", help="second of the trace (default: its end)")
    add("--trace-speed", type=SECONDS, default=1.0, metavar="X", help="so much faster (default: %(default)s)")
    add("--scale-requests", type=SECONDS, default=1.0, metavar="X", help="times the rates of a CSV of minutes")
    add("--concurrency", type=COUNT, metavar="N", help="clients that wait for each answer (closed loop)")
    add("--requests", type=COUNT, metavar="N", help="conversations in all (expertflow: 2560)")
    add("--duration", type=SECONDS, metavar="S", help="seconds in which requests are due")
    add("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")


def _rate(text: str) -> RateCurve | AllAtOnce:
    if text == "inf":
        return AllAtOnce()
    found: RateCurve = typed(parse_curve)(text)
    return found


def add_workload(parser: Parser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--workload", choices=WORKLOADS, help="default: trace with --trace, file with --prompts, else lengths")
    add("--prompt-tokens", type=typed(parse_lengths), metavar="N or A..B", help="uniform; of agents: tools' results")
    add("--output-tokens", type=typed(parse_lengths), metavar="N or A..B", help="uniform")
    add("--text", action="store_true", help="prompts of words instead of token ids (chat always has words)")
    add("--vocabulary", type=number(11, whole=True), default=1000, metavar="N", help="token ids are below")
    add("--turns", type=typed(parse_lengths), metavar="N or A..B", help="of a chat (1..5), or an agent (2..6)")
    add("--prefixes", type=COUNT, default=4, metavar="N", help="system prompts that chats share (default: %(default)s)")
    add("--prefix-tokens", type=COUNT, default=256, metavar="N", help="of each (default: %(default)s)")
    add("--think", type=number(0), default=0.0, metavar="S", help="mean time between a chat's turns")
    add("--tools", choices=("auto", "on", "off"), default="auto", help="in agents' bodies (auto: if it takes them)")
    add("--prompts", type=Path, metavar="FILE", help="ShareGPT's JSON, or JSON lines with prompt or messages")
    add("--hot-experts", type=typed(parse_experts), metavar="L:E,...", help="experts to make hot, by layer and number")
    add("--recording", type=Path, metavar="FILE", help="what routers did, from `expertmesh-load record`")
    add("--hot-prompts", type=COUNT, default=16, metavar="N", help="prompts or topics to take (default: %(default)s)")
    add("--tenants", type=Path, metavar="FILE", help='[{"name", "share", "weight", "priority", "key" or "key_file"}]')
    add("--temperature", type=number(0), default=0.0, help="default: %(default)s")
    add("--no-ignore-eos", action="store_false", dest="ignore_eos", help="answers may end early")
    add("--body", metavar="JSON", default="{}", help="more members of each body")


def add_clients(parser: Parser) -> None:
    group = parser.add_argument_group("clients")
    add = group.add_argument
    add("--retries", type=number(0, whole=True), default=0, metavar="N", help="after 429 and 503, as Retry-After says")
    add("--idempotency-keys", action="store_true", help="one for each request; broken connections are retried, too")
    add("--disconnect", type=share, default=0.0, metavar="SHARE", help="of the clients that hang up in the middle")
    add("--timeout", type=SECONDS, default=600.0, metavar="S", help="of a try (default: %(default)s)")
    add("--connect-timeout", type=SECONDS, default=30.0, metavar="S", help="default: %(default)s")
    add("--silence-timeout", type=SECONDS, metavar="S", help="without a byte")
    add("--processes", type=COUNT, default=1, metavar="N", help="that share the load (default: %(default)s)")
    add("--realtime", action="store_true", help="before all other processes of this machine (needs CAP_SYS_NICE)")


def add_judgement(parser: Parser) -> None:
    group = parser.add_argument_group("judgement")
    add = group.add_argument
    objective = "METRIC:pN<TIME of ttft, itl, tpot, e2e, service: ttft:p99<500ms; may be repeated"
    add("--slo", type=typed(parse_objective), action="append", default=[], metavar="OBJECTIVE", help=objective)
    add("--confidence", type=confidence, default=0.95, help="of intervals (default: %(default)s)")
    limit = "of the send lag's 99th percentile: a share of the mean gap, or a time (default: %(default)s)"
    add("--lag-limit", type=typed(parse_lag_limit), default="5%", metavar="LIMIT", help=limit)
    add("--check", metavar="FILE", help="answers to compare with, or `serial`: those of a run one by one before")
    add("--check-requests", type=COUNT, default=32, metavar="N", help="of the serial run (default: %(default)s)")
    add("--allow-wrong", type=share, default=0.0, metavar="SHARE", help="of the answers compared (default: none)")


def add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--out", type=Path, metavar="FILE", help="results as JSON")
    add("--html", type=Path, metavar="FILE", help="results as a page")
    add("--junit", type=Path, metavar="FILE", help="results for CI")
    add("--label", default="", help="of this measurement")
    add("--quiet", action="store_true", help="print nothing but errors")


def given(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, object]:
    """Returns the settings of a command, to be kept with its results."""
    plain = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | bool)}
    shown = {name: _masked(value) if isinstance(value, str) else value for name, value in plain.items()}
    return {"command": [_masked(word) for word in argv], **shown}


def _masked(text: str) -> str:
    """Returns ``text`` without the users and passwords of its URLs: results are passed on."""
    return re.sub(r"://[^/@\s]+@", "://***@", text)
