"""`expertmesh ray up|status|down`: an application on a Ray cluster, from options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.config import OptionParser, concerned, layer, nearest_hint, parse_options
from services.errors import ConfigError, RayMissing

_USAGE = """usage: expertmesh ray COMMAND [OPTIONS]

Serves a model on a Ray cluster, with the processes that `expertmesh serve` starts on one machine.

  up       deploy an application and wait until it is ready
  status   show its processes, where they run, and what they wait for
  down     drain its processes and delete it

`expertmesh ray COMMAND --help` lists the options of a command. An application in a file is for `serve deploy`."""
_COMMON = ("model", "layout", "workers", "expert_workers", "expert_groups", "redis_url", "auth", "served_model_name")


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv`` and return its exit code.

    Raises:
        ConfigError: it cannot run; the error says why.
    """
    commands: Mapping[str, Callable[[Sequence[str]], int]] = {"up": _up, "status": _status, "down": _down}
    first, rest = (argv[0], argv[1:]) if argv else ("", [])
    if first in ("", "-h", "--help", "help"):
        print(_USAGE)
        return 0 if first else 2
    if first not in commands:
        raise ConfigError(
            f"There is no `expertmesh ray {first}`.", hint=nearest_hint(first, commands) or "See `expertmesh ray`."
        )
    return commands[first](rest)


def _up(argv: Sequence[str]) -> int:
    parser = _parser("up", "Deploy an application, wait until it is ready, and print its URL.")
    parser.add_argument("--schedulers", type=int, default=2, metavar="N", help="schedulers; one leads (default: 2)")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="minimum of gateways (default: 1)")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="cores that Ray reserves for each worker")
    parser.add_argument("--gpus", type=float, metavar="N", help="GPUs of each worker (default: 1 where there are any)")
    parser.add_argument("--http-host", default="127.0.0.1", metavar="HOST", help="address of Serve's proxies")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="port of Serve's proxies")
    names = [name for name in concerned(None) if name not in ("host", "port", "metrics_port", "fabric_port", "api_key")]
    given = parse_options(parser, argv, names, positional=True, common=_COMMON)
    layered = layer(given)
    values = {name: layered.settings.model_dump(mode="json")[name] for name in layered.origins}
    worker = {"cpus": given["cpus"], "gpus": given["gpus"]}
    arguments = {
        "settings": values,
        "schedulers": given["schedulers"],
        "gateways": {"min_replicas": given["gateways"], "max_replicas": max(4, given["gateways"])},
        "attention": worker,
        "experts": worker,
    }
    code: int = _cluster().up(
        arguments,
        address=given["address"],
        name=given["name"],
        http={"host": given["http_host"], "port": given["http_port"]},
    )
    return code


def _status(argv: Sequence[str]) -> int:
    given = vars(_parser("status", "Show an application's processes.").parse_args(argv))
    code: int = _cluster().status(address=given["address"], name=given["name"])
    return code


def _down(argv: Sequence[str]) -> int:
    given = vars(_parser("down", "Drain an application's processes, and delete it.").parse_args(argv))
    code: int = _cluster().down(address=given["address"], name=given["name"])
    return code


def _parser(command: str, about: str) -> OptionParser:
    parser = OptionParser(f"expertmesh ray {command}", about)
    parser.add_argument("--address", metavar="HOST:PORT", help="the cluster (default: RAY_ADDRESS, or one that runs)")
    parser.add_argument("--name", default="expertmesh", help="the application's name (default: expertmesh)")
    return parser


def _cluster() -> Any:
    try:
        from services.ray import cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise RayMissing from error
    return cluster
