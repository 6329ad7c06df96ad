"""`expertmesh ray up|status|down`: an application on a Ray cluster, from options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.config import ENV_PREFIX, Layered, OptionParser, chosen, concerned, layer, parse_options
from services.errors import ConfigError, RayMissing
from services.ray.arguments import NOT_HERE
from services.runtime.local_servers import OnRay

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
    return chosen("expertmesh ray", argv, commands, _USAGE)(argv[1:])


def _up(argv: Sequence[str]) -> int:
    parser = _parser("up", "Deploy an application, wait until it is ready, and print its URL.")
    parser.add_argument("--schedulers", type=int, default=2, metavar="N", help="schedulers; one leads (default: 2)")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="minimum of gateways (default: 1)")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="cores that Ray reserves for each worker")
    parser.add_argument("--gpus", type=float, metavar="N", help="GPUs of each worker (default: 1 where there are any)")
    parser.add_argument("--http-host", default="127.0.0.1", metavar="HOST", help="address of Serve's proxies")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="port of Serve's proxies")
    parser.add_argument("--route-prefix", default="/", metavar="PATH", help="path of the API (default: /)")
    parser.add_argument("--update", action="store_true", help="change the application that has this name")
    names = [name for name in concerned(None) if name not in NOT_HERE]
    given = parse_options(parser, argv, names, positional=True, common=_COMMON)
    worker = {"cpus": given["cpus"], "gpus": given["gpus"]}
    arguments = {
        "settings": settings_given(layer(given)),
        "schedulers": given["schedulers"],
        "gateways": {"min_replicas": given["gateways"], "max_replicas": max(4, given["gateways"])},
        "attention": worker,
        "experts": worker,
    }
    cluster = _cluster()
    place = cluster.Place(
        address=given["address"],
        name=given["name"],
        host=given["http_host"],
        port=given["http_port"],
        route_prefix=given["route_prefix"],
        update=given["update"],
    )
    code: int = cluster.up(arguments, place)
    return code


def settings_given(layered: Layered) -> dict[str, Any]:
    """Return the settings that are no defaults, as the application's arguments name them: paths are absolute, as
    processes start in folders of Ray's, and the content of a file of secrets stays in it.

    Raises:
        ConfigError: one is for each process alone, or not to be read in Ray's records.
    """
    for name in NOT_HERE:
        if name in layered.origins:
            _refuse(name, layered.origin(name))
    settings = layered.settings
    values = {name: _absolute(name, getattr(settings, name)) for name in layered.origins}
    if settings.redis_url_file is not None:
        del values["redis_url"]
    return settings.model_copy(update=values).model_dump(mode="json", include=set(values))


def _refuse(name: str, origin: str) -> None:
    written = origin if origin.startswith((ENV_PREFIX, "-")) else f"{name} in {origin}"
    hints = {
        "api_key": "API keys are made with `expertmesh keys`, or read from --api-keys-file.",
        "host": "Serve's proxies listen on --http-host.",
        "port": "Serve's proxies listen on --http-port.",
    }
    hint = hints.get(name, "Leave it out: each process gets its own.")
    raise ConfigError(f"{written} does not apply to `expertmesh ray up`.", hint=hint)


def _absolute(name: str, value: Any) -> Any:
    """Return a path as all processes on this machine find it. A model that is no folder here is one of the hub."""
    return value.absolute() if isinstance(value, Path) and (name != "model" or value.is_dir()) else value


def _status(argv: Sequence[str]) -> int:
    given = vars(_parser("status", "Show an application's processes.").parse_args(argv))
    code: int = _cluster().status(address=given["address"], name=given["name"])
    return code


def _down(argv: Sequence[str]) -> int:
    given = vars(_parser("down", "Drain an application's processes, and delete it.").parse_args(argv))
    code: int = _cluster().down(address=given["address"], name=given["name"])
    return code


def application(name: str) -> OnRay:
    """Return the application for a command that is not about Ray.

    Raises:
        RayUnavailable: no cluster can be reached.
        ConfigError: the cluster has no such application.
    """
    found: OnRay = _cluster().application(name)
    return found


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
