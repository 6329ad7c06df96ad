"""The options of `expertmesh bench`. Those that vLLM's benchmarks have, too, have their names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import LoadError
from loadgen.workload.words import Lengths, parse_lengths
from services.bench import latency, throughput
from services.config import ATTENTION, OptionParser, Settings, concerned, layer, mask_url, option, parse_options
from services.config.sections import EngineSettings, ModelSettings
from services.errors import ConfigError

SERVE_WORKLOADS = (*throughput.WORKLOADS, "chat", "agents")
GOODPUT: Mapping[str, str] = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
"""Names in vLLM's --goodput, and the load generator's metrics."""
_SECRETS = ("api_key", "redis_url", "fabric_secret")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What was given: ``own`` options of the bench, and ``settings`` with ``words``, their form on a command line."""

    own: argparse.Namespace
    settings: Settings
    words: Sequence[str]

    def shown(self) -> dict[str, object]:
        """Returns the options for the results, without secrets."""
        own = {name: _plain(value) for name, value in vars(self.own).items()}
        return own | {"settings": [_masked(word) for word in _without_secrets(self.words)]}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | list | None) else str(value)


def _masked(word: str) -> str:
    return mask_url(word) if "://" in word else word


def _without_secrets(words: Sequence[str]) -> list[str]:
    secret = {option(name) for name in _SECRETS}
    return ["***" if before in secret else word for before, word in zip(["", *words], words, strict=False)]


def latency_options(argv: Sequence[str]) -> Given:
    """Returns the options of `bench latency`. Raises ConfigError."""
    parser = OptionParser("expertmesh bench latency", "Time a decode step and prompts by batch, without a server.")
    add = _group(parser)
    add("--batch-size", type=_list, metavar="N,N,...", help="sequences at a time (default: 1,8,32)")
    add("--input-len", type=_number(1), default=128, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=_number(2), default=128, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--num-iters", type=_number(1), default=5, metavar="N", help="rounds of each batch (default: %(default)s)")
    add("--num-iters-warmup", type=_number(0), default=1, metavar="N", help="rounds before (default: %(default)s)")
    _add_engine(add)
    _add_common(parser)
    return _given(parser, argv, _of_an_engine())


def throughput_options(argv: Sequence[str]) -> Given:
    """Returns the options of `bench throughput`. Raises ConfigError."""
    about = "Answer all requests at once, without a server, and time the whole."
    parser = OptionParser("expertmesh bench throughput", about)
    add = _group(parser)
    _add_workload(add, throughput.WORKLOADS)
    add("--num-iters", type=_number(1), default=1, metavar="N", help="rounds (default: %(default)s)")
    add("--num-warmups", type=_number(0), default=32, metavar="N", help="requests before (default: %(default)s)")
    _add_engine(add)
    _add_common(parser)
    return _given(parser, argv, _of_an_engine())


def serve_options(argv: Sequence[str]) -> Given:
    """Returns the options of `bench serve`. Raises ConfigError."""
    about = "Serve a model as `expertmesh serve` does, with its options, and measure what clients see."
    parser = OptionParser("expertmesh bench serve", about)
    add = _group(parser)
    add("--url", "--base-url", help="measure the server that runs there instead; --model is then a name that it serves")
    _add_workload(add, SERVE_WORKLOADS)
    add("--request-rate", type=_rate, default=math.inf, metavar="R", help="a second; inf: all at once (default)")
    add("--max-concurrency", type=_number(1), metavar="N", help="clients that each wait for their answer instead")
    goodput = f"the goodput's objective, of {', '.join(GOODPUT)}; as often as given"
    add("--goodput", type=_goodput, action="append", default=[], metavar="METRIC:MS", help=goodput)
    add("--num-warmups", type=_number(0), default=1, metavar="N", help="requests before (default: %(default)s)")
    _add_common(parser)
    return _given(parser, argv, concerned(None))


_Add = Callable[..., argparse.Action]


def _group(parser: OptionParser) -> _Add:
    return parser.add_argument_group("what is measured").add_argument


def _add_workload(add: _Add, kinds: Sequence[str]) -> None:
    add("--workload", choices=kinds, default=kinds[0], help="of expertmesh-load (default: %(default)s)")
    add("--dataset-path", type=Path, metavar="FILE", help="prompts of ShareGPT's JSON, or JSON lines, instead")
    add("--input-len", type=_lengths, metavar="N or A..B", help="tokens of a prompt (default: the workload's)")
    add("--output-len", type=_lengths, metavar="N or A..B", help="tokens of an answer (default: the workload's)")
    add("--num-prompts", type=_number(1), metavar="N", help="requests (default: 2560, or those of the file)")


def _add_engine(add: _Add) -> None:
    formats = "auto: the checkpoint's weights; dummy: random ones, by config.json alone"
    add("--load-format", choices=("auto", "dummy"), default="auto", help=f"{formats} (default: %(default)s)")


def _add_common(parser: OptionParser) -> None:
    add = parser.add_argument_group("beside vLLM").add_argument
    add("--against", choices=("vllm",), help="measure vLLM, too, with the same model, lengths and load")
    add("--vllm", metavar="PYTHON", help="the Python that has vLLM (default: this one)")
    add("--vllm-options", default="", metavar="WORDS", help="more options of `vllm serve`, in one word")
    add = parser.add_argument_group("results").add_argument
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: %(default)s)")
    add("--json", "--output-json", type=Path, metavar="FILE", help="every sample, and where it was measured")
    add("--picture", type=Path, metavar="FILE.svg", help="a picture of the results")


def _of_an_engine() -> list[str]:
    known = {*ModelSettings.model_fields, *EngineSettings.model_fields} - {"served_model_name", "overlap"}
    return [name for name in concerned(ATTENTION) if name in known]


_SHORT = ("model", "dtype", "device", "max_model_len", "max_num_seqs", "kv_memory_gib", "threads", "prefix_cache")


def _given(parser: OptionParser, argv: Sequence[str], names: Sequence[str]) -> Given:
    mine = {action.dest for action in parser._actions}
    found = parse_options(parser, argv, names, positional=True, common=[name for name in _SHORT if name in names])
    own = argparse.Namespace(**{name: value for name, value in found.items() if name in mine and name != "help"})
    if own.against is None and (own.vllm or own.vllm_options):
        raise ConfigError("--vllm and --vllm-options are for a comparison.", hint="Add --against vllm.")
    if getattr(own, "url", None) is not None:  # --model is a name then, and nothing is started
        model = {"model": found.pop("model")} if "model" in found else {}
        _refuse_settings(found)
        own.served_model = model.get("model")
    return Given(own=own, settings=layer(found).settings, words=_words(found))


def _refuse_settings(found: Mapping[str, Any]) -> None:
    given = [option(name) for name in found if name in Settings.model_fields]
    if given:
        raise ConfigError(
            f"--url measures a server that runs, and {given[0]} would be for one that is started.",
            hint="Leave one of them out.",
        )


def _words(found: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in found.items():
        if name == "config" and value:
            words += ["--config", str(value)]
        if name in Settings.model_fields:
            words += [_switch(name, value)] if isinstance(value, bool) else [option(name), str(value)]
    return words


def _switch(name: str, on: bool) -> str:
    return option(name) if on else "--no-" + option(name)[2:]


def _number(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parsed


def _list(text: str) -> list[int]:
    return list(dict.fromkeys(_number(1)(part) for part in text.split(",")))


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except LoadError as error:
        raise argparse.ArgumentTypeError(error.message.removesuffix(".")) from error


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: write requests a second, or inf")
    return value


def _goodput(text: str) -> str:
    """Returns the load generator's objective for vLLM's ``ttft:500``. The goodput counts requests within it; the
    verdict is about the 99th percentile."""
    name, _, target = text.partition(":")
    try:
        value = float(target)
    except ValueError:
        value = 0.0
    if name not in GOODPUT or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no objective: write ttft:500, in ms, or {' or '.join(GOODPUT)}")
    return f"{GOODPUT[name]}:p99<{value:.3f}ms"


def batches(given: Given) -> Sequence[int]:
    """Returns the batch sizes: those that were asked for, or the usual ones that --max-num-seqs has room for."""
    most = given.settings.max_num_seqs
    if given.own.batch_size is not None:
        if most is not None:
            latency.check_batch(max(given.own.batch_size), most)  # before anything is loaded
        return list(given.own.batch_size)
    return [batch for batch in latency.BATCHES if most is None or batch <= most] or [most or 1]
