"""``expertmesh-load null``: a server without a model whose delays are known, to try out what measures."""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial

from loadgen.errors import BadSetting
from loadgen.null.behaviour import Behaviour, Faults, parse_stall
from loadgen.null.server import serve


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="expertmesh-load null", description=__doc__)
    add = found.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    add("--first-token", type=float, default=0.0, metavar="S", help="seconds until the first token")
    add("--token-gap", type=float, default=0.0, metavar="S", help="seconds between tokens")
    add("--places", type=int, metavar="N", help="requests that are served at once; others wait (default: all are)")
    add("--stall", type=parse_stall, action="append", default=[], metavar="BEGIN:S", help="do nothing; may be repeated")
    add("--epoch", type=float, metavar="UNIX", help="second 0 of the stalls (default: when the first request comes)")
    add("--refuse", type=float, default=0.0, metavar="SHARE", help="answer this share with 429")
    add("--retry-after", type=int, metavar="S", help="what a 429 asks to wait")
    add("--fail", type=float, default=0.0, metavar="SHARE", help="answer this share with 500")
    add("--break", type=float, default=0.0, metavar="SHARE", dest="broken", help="break this share off")
    add("--wrong", type=float, default=0.0, metavar="SHARE", help="answer this share otherwise than always")
    add("--no-tools", action="store_false", dest="tools", help="refuse bodies with tools, as some servers do")
    add("--seed", type=int, default=0)
    add("--processes", type=int, default=1, help="that share the port; each has its own --places and counts")
    return found


def behaviour_of(options: argparse.Namespace) -> Behaviour:
    faults = Faults(
        refused=options.refuse,
        failed=options.fail,
        broken=options.broken,
        wrong=options.wrong,
        retry_after_s=options.retry_after,
    )
    return Behaviour(
        first_s=options.first_token,
        gap_s=options.token_gap,
        places=options.places,
        stalls=tuple(options.stall),
        faults=faults,
        tools=options.tools,
        seed=options.seed,
    )


def run_loop(work: Coroutine[object, object, None]) -> None:
    """Run ``work`` on uvloop where it is installed."""
    gc.freeze()
    gc.disable()  # a pause of the collector would be a delay that nobody scheduled; what is made here has no cycles
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


def _serve(options: argparse.Namespace, *, say: bool) -> None:
    def ready(port: int) -> None:
        if say:
            print(f"null server at http://{options.host}:{port}", flush=True)

    shared = options.processes > 1
    with suppress(KeyboardInterrupt):
        run_loop(
            serve(
                behaviour_of(options),
                host=options.host,
                port=options.port,
                epoch=options.epoch,
                share_port=shared,
                on_ready=ready,
            )
        )


def main(argv: Sequence[str]) -> int:
    found = parser()
    options = found.parse_args(argv)
    if options.processes > 1 and not options.port:
        found.error("several processes need a --port")
    context = multiprocessing.get_context("spawn")
    more = [
        context.Process(target=partial(_serve, options, say=False), daemon=True) for _ in range(options.processes - 1)
    ]
    for process in more:
        process.start()
    try:
        _serve(options, say=True)
    except OSError as error:
        raise BadSetting(f"Cannot listen at {options.host}, port {options.port}: {error.strerror or error}.") from error
    finally:
        for process in more:
            process.terminate()
    return 0
