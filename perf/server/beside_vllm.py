"""This server and vLLM's on one GPU, one after the other, under the same load of the same clients.

    PYTHONPATH=.:kernels python3 -m perf.server.beside_vllm MODEL_FOLDER [--rates 50 100 250 inf] [--requests 2560]
        [--ours '--kv-memory-gib 60 --max-num-seqs 448'] [--vllm-options '--max-num-seqs 512'] [--rounds 3] [--out DIR]
        [--vllm 'env PYTHONPATH=/site python3 -m vllm.entrypoints.cli.main']

It needs a GPU that nothing else uses, vLLM (--vllm is the command that starts it: with the word `serve` as a server,
with `bench serve` as the client), and a checkpoint that both servers load, with its tokenizer. Neither server caches
prefixes. Both are measured by `vllm bench serve` (or by --client guidellm with its --tool) and by this project's
client. OUT gets beside_vllm.json, and what the clients wrote. Exit code 2: a server or the tool refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.errors import LoadError
from loadgen.other_clients import CLIENTS, OtherClientError, command
from loadgen.preflight import find_server
from loadgen.served import Served, served, started
from perf.server.trusted_client import (
    OURS,
    Run,
    ServerRefused,
    arguments,
    clock,
    load_of,
    measure,
    table,
    write,
)
from services.bench.vllm import START_S, server_command

NAME = "m"
SERVERS = ("expertmesh", "vllm")


def vllm_command(vllm: str, model: Path, port: int, options: str) -> list[str]:
    """Returns the command of vLLM's server."""
    more = ["--no-enable-prefix-caching", *shlex.split(options)]
    return server_command(shlex.split(vllm), str(model), NAME, port, more)


def our_options(model: Path, options: str) -> list[str]:
    """Returns the options of ``expertmesh serve``."""
    words = ["--model", str(model), "--served-model-name", NAME, "--no-prefix-cache", "--log-level", "warning"]
    return [*words, "--max-queued-requests", "10000", *shlex.split(options)]


@contextlib.contextmanager
def server(which: str, options: argparse.Namespace) -> Iterator[Served]:
    """Runs ``expertmesh`` or ``vllm`` while the context is open."""
    port = options.port + (which == "vllm")  # the one that has ended may hold its own for a while
    if which == "vllm":
        words = vllm_command(options.vllm, options.model, port, options.vllm_options)
        running = started(words, url=f"http://127.0.0.1:{port}", ready="/health", start_s=START_S)
    else:
        running = served(our_options(options.model, options.ours), port=port)
    with running as found:
        yield found


def check(model: Path) -> None:
    """Look for what both servers and the clients read.

    Raises:
        ServerRefused: a file is not there.
    """
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (model / name).is_file():
            raise ServerRefused(f"{model} has no {name}. Both servers and the clients need it.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m perf.server.beside_vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[arguments()],
    )
    parser.set_defaults(client="vllm", rates=[50.0, 100.0, 250.0, None], requests=2560, out=Path(".cache/beside-vllm"))
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--vllm", default="vllm", metavar="COMMAND", help="what starts vLLM (default: %(default)s)")
    parser.add_argument("--vllm-options", default="", metavar="OPTIONS", help="more options of its server")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="more options of expertmesh serve")
    parser.add_argument("--port", type=int, default=8400, help="and the one after it (default: %(default)s)")
    options = parser.parse_args(argv)
    other, say = CLIENTS[options.client], clock()
    runs: list[Run] = []
    load = load_of(options, url="", model=NAME, tokenizer=str(options.model.resolve()))
    try:
        check(options.model)
        command(CLIENTS["vllm"], options.vllm)
        words = command(other, options.tool or (options.vllm if other.name == "vllm" else None))
        for which in SERVERS:
            say(f"starting {which}")
            with server(which, options) as running:
                find_server(running.url, NAME, None, None)
                runs += measure(replace(load, url=running.url), options, other, words, say, server=which)
    except (LoadError, OtherClientError, ServerRefused) as error:
        print(error, file=sys.stderr)
        return 2
    finally:  # what was measured before a server failed is kept
        if runs:
            write(options.out / "beside_vllm.json", load, runs)
    for client in (other.name, OURS):
        sides = {which: [run for run in runs if (run.server, run.client) == (which, client)] for which in SERVERS}
        print(f"\nMeasured by {client}:\n\n{table(sides)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
