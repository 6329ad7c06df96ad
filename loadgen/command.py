"""The command ``expertmesh-load``. Each part imports what it needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from loadgen.errors import OK, USAGE
from services.errors import ExpertMeshError

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """``place`` is MODULE:FUNCTION, which takes the words after the command and returns the exit code."""

    about: str
    place: str

    def run(self, argv: Sequence[str]) -> int:
        module, _, name = self.place.partition(":")
        return cast(Callable[[Sequence[str]], int], getattr(importlib.import_module(module), name))(argv)


COMMANDS: Mapping[str, Command] = {
    "run": Command("send one load and measure what clients see", "loadgen.cli.run:run"),
    "search": Command("find the highest rate that keeps objectives", "loadgen.cli.run:search"),
    "sweep": Command("measure several loads: throughput over latency", "loadgen.cli.run:sweep"),
    "merge": Command("add the results of all shards of one run", "loadgen.cli.run:merged"),
    "report": Command("draw results", "loadgen.report.command:report"),
    "diff": Command("compare two results", "loadgen.report.command:diff"),
    "record": Command("record which experts a checkpoint's prompts go to", "loadgen.record_experts:main"),
    "null": Command("a server whose delays are known, to try this out", "loadgen.null.command:main"),
}


def _usage() -> str:
    lines = [f"  {name:8} {command.about}" for name, command in COMMANDS.items()]
    codes = (
        "0 all is well, 1 wrong answers, failed requests or an objective missed, 2 usage, 3 the run is invalid, "
        "4 it was cut short"
    )
    return "\n".join(
        [
            "usage: expertmesh-load COMMAND ...",
            "",
            *lines,
            "",
            "`expertmesh-load COMMAND --help` has the options.",
            codes,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, the process's arguments by default, and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name in ("-h", "--help", ""):
        print(_usage())
        return OK if name else USAGE
    if (command := COMMANDS.get(name)) is None:
        print(f"There is no command {name!r}.\n\n{_usage()}", file=sys.stderr)
        return USAGE
    try:
        return command.run(rest)
    except ExpertMeshError as error:
        print(error, file=sys.stderr)
        return int(getattr(error, "exit_code", USAGE))
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{error.filename}: {error.strerror}.", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED
