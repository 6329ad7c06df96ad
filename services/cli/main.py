"""Finds the command and runs it. Each command imports what it needs, so that light ones stay fast."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.errors import ConfigError, ExpertMeshError, WorkerExtraMissing

DEFAULT_COMMAND = "serve"
_INTERRUPTED = 130
Arguments = Sequence[str]


class Command(NamedTuple):
    """``run`` takes the arguments after the command's name and returns the exit code."""

    summary: str
    run: Callable[[Arguments], int]


def _serve(argv: Arguments) -> int:
    from services.config import load_settings
    from services.supervisor import serve

    return serve(load_settings(argv))


def _workers(argv: Arguments) -> int:
    from services.config import WORKERS, load_settings
    from services.supervisor import run_workers

    return run_workers(load_settings(argv, role=WORKERS))


def _demo(argv: Arguments) -> int:
    from services.config import OptionParser, concerned, layer, parse_options
    from services.demo.tour import run_demo

    about = "Serve a small checkpoint, creating it if necessary, and stream a completion."
    parser = OptionParser("expertmesh demo", about, epilog="Takes the options of `expertmesh serve`, too.")
    return run_demo(layer(parse_options(parser, argv, concerned(None), positional=True, common=())))


def _version(argv: Arguments) -> int:
    from importlib.metadata import version

    if argv:
        raise ConfigError(f"Unexpected argument {argv[0]!r}.", hint="`expertmesh version` takes none.")
    print(f"expertmesh {version('expertmesh')}")
    return 0


def _from(module: str) -> Callable[[Arguments], int]:
    """Returns the ``main`` of ``module``, imported when it is called."""

    def run(argv: Arguments) -> int:
        try:
            code: int = importlib.import_module(module).main(argv)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in WorkerExtraMissing.packages:
                raise
            raise WorkerExtraMissing(package) from error
        return code

    return run


def _watching(module: str) -> Callable[[Arguments], int]:
    """Returns the ``main`` of a command about a deployment, which may be on a Ray cluster."""

    def run(argv: Arguments) -> int:
        from services.ray.command import application

        code: int = importlib.import_module(module).main(argv, on_ray=application)
        return code

    return run


COMMANDS = {
    "serve": Command("run all roles in one process tree (the default)", _serve),
    "gateway": Command("run the REST API on its own", _from("services.gateway.role")),
    "scheduler": Command("run a scheduler on its own, leader or standby", _from("services.scheduler.role")),
    "attention": Command("run an attention worker on its own", _from("services.attention.role")),
    "experts": Command("run an expert worker on its own", _from("services.experts.role")),
    "colocated": Command("run attention and experts in one process, on one GPU", _from("services.colocated.role")),
    "workers": Command("run the workers of one machine, one process per GPU", _workers),
    "config": Command("show the effective configuration and where each value came from", _from("services.cli.config")),
    "top": Command(
        "watch tokens, latencies, workers and load of a running deployment live", _watching("services.top.__main__")
    ),
    "status": Command(
        "show whether a deployment is up, and what is missing and why", _watching("services.status.__main__")
    ),
    "dashboards": Command(
        "draw the dashboards that come along from a Prometheus, as HTML", _from("services.dashboards.__main__")
    ),
    "observe": Command(
        "run Prometheus and the dashboards for the servers of this machine", _from("services.observe.__main__")
    ),
    "trace": Command("show what one request passed, in all processes", _from("services.cli.trace.command")),
    "plan": Command(
        "recommend a layout for a model and its GPUs, with the command that runs it", _from("services.planner.plan")
    ),
    "bench": Command("measure an engine or a server, by itself or beside vLLM", _from("services.bench.command")),
    "ray": Command("serve a model on a Ray cluster: up, status, down", _from("services.ray.command")),
    "queue": Command("list, show, retry or drop dead-lettered requests", _from("services.cli.queue")),
    "redis-acl": Command("print a Redis user for each role (ACL rules)", _from("services.cli.redis_acl")),
    "keys": Command("create, list or revoke API keys", _from("services.cli.keys")),
    "ask": Command("stream one completion from a running server", _from("services.cli.ask")),
    "fetch": Command("download a checkpoint into a folder and verify it", _from("services.cli.fetch")),
    "digests": Command(
        "write digests of a checkpoint's experts, to verify weights from peers", _from("services.cli.digests")
    ),
    "demo-model": Command("write a small checkpoint for trials", _from("services.cli.demo_model")),
    "demo": Command("serve that checkpoint and stream a completion from it", _demo),
    "version": Command("print the version", _version),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv`` (default: the process's arguments) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _end_on_sigterm()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ExpertMeshError as error:
        print(f"expertmesh: {error.message}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))  # start-up errors have one, and those of the load generator
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `expertmesh config | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:  # argparse has printed its --help
        return end.code if isinstance(end.code, int) else 0


def _end_on_sigterm() -> None:
    """Ends at SIGTERM before the role has set its handler. The kernel delivers no signal without a handler to the first
    process of a container: it would be lost, and the pod would stay until it is killed."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if first in ("-V", "--version"):
        return _version(words[1:])
    if not first or first.startswith("-"):
        return COMMANDS[DEFAULT_COMMAND].run(words)
    if first not in COMMANDS:
        from services.config import nearest_hint

        raise ConfigError(
            f"Unknown command {first!r}.", hint=nearest_hint(first, COMMANDS) or "See `expertmesh --help`."
        )
    return COMMANDS[first].run(words[1:])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: expertmesh [COMMAND] [OPTIONS]",
            "",
            "Serves Mixture-of-Experts language models.",
            "",
            *lines,
            "",
            "`expertmesh COMMAND --help` lists the options of a command.",
            "Options beat environment variables (EXPERTMESH_*), which beat the file given by --config.",
        ]
    )
