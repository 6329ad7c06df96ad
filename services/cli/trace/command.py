"""`expertmesh trace REQUEST_ID`: what one request passed, as a tree with bars, from the trace folder of a server.

In: the files of the folder. Out: lines in the terminal, or a file for Perfetto. The exit code is 1 without a trace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from services.cli.trace.files import Record, TraceFolder
from services.cli.trace.perfetto import timeline
from services.cli.trace.tree import lines, nodes_of
from services.config import OptionParser
from services.errors import ConfigError, ExpertMeshError
from services.runtime.local_servers import COLLECTOR, LocalServer, local_servers, none_found, root_url

_START = "Start it with `--trace-sample 1` to trace every request"
_SEND = f"{_START}, or send one with the header `traceparent`."


class NoTrace(ExpertMeshError):
    """There is no trace of what was asked for."""


def main(argv: Sequence[str]) -> int:
    """Prints the trace, or writes the file.

    Raises:
        NoTrace: there is none; the error says why.
        ConfigError: no server is found, or several are and none is chosen; options do not go together.
    """
    given = _parser().parse_args(argv)
    if given.request_id is None and given.perfetto is None:
        raise ConfigError(
            "No request is given.", hint="Give the X-Request-Id of an answer, or --perfetto FILE for all requests."
        )
    folder = TraceFolder(given.folder or _folder_of_server(given.url))
    if not folder.files:
        raise NoTrace(f"There are no traces in {folder.path}.", hint="Does the server trace (--trace-folder DIR)?")
    if given.request_id is None:
        return _write(given.perfetto, list(folder.everything()))
    spans, others = _found(folder, given.request_id)
    if given.perfetto is not None:
        return _write(given.perfetto, spans)
    _show(spans, others, whole=given.all)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        "expertmesh trace", "Show what one request passed in all processes of a server that traces (--trace-sample)."
    )
    parser.add_argument(
        "request_id", nargs="?", metavar="REQUEST_ID", help="X-Request-Id or id of the answer, or a trace's id"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="trace folder (default: that of the server)")
    parser.add_argument("--url", help="the server on this machine that has this address (default: the only one)")
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write a file for ui.perfetto.dev instead (Chrome's trace format); without REQUEST_ID of all requests and "
        "all steps of engines",
    )
    parser.add_argument("--all", action="store_true", help="a line for each span, not one for many that are alike")
    return parser


def _folder_of_server(url: str | None) -> Path:
    server = _server(url)
    if not server.traces:
        raise NoTrace(f"The server at {server.url} does not trace requests.", hint=f"{_START}.")
    if server.traces == COLLECTOR:
        raise NoTrace(
            f"The traces of the server at {server.url} go to a collector alone.",
            hint="Look there, or start the server with --trace-folder DIR, too.",
        )
    return Path(server.traces)


def _server(url: str | None) -> LocalServer:
    servers = [server for server in local_servers() if url is None or server.url == root_url(url)]
    if not servers:
        raise ConfigError(f"{none_found()}.", hint="Give the folder with its traces: --folder DIR.")
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        raise ConfigError("Several servers run on this machine.", hint=f"Choose one by --url: {urls}.")
    return servers[0]


def _found(folder: TraceFolder, wanted: str) -> tuple[list[Record], int]:
    """Return the spans of the newest trace that ``wanted`` names, and how many older ones there are."""
    traces = folder.traces_of(wanted)
    if traces:
        return folder.trace(traces[-1]), len(traces) - 1
    share = folder.share()
    if share is not None and share < 1:
        raise NoTrace(
            f"There is no trace of {wanted}: the server traces {100 * share:g} % of its requests, and that is none of "
            "them or no request of this server.",
            hint=_SEND,
        )
    raise NoTrace(
        f"There is no request {wanted} in {folder.path}.",
        hint="Its id is the X-Request-Id of its answer; a trace is complete a second after the answer.",
    )


def _write(file: Path, spans: Sequence[Record]) -> int:
    try:
        file.write_text(json.dumps(timeline(spans)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.", hint="Choose another file.") from error
    print(f"wrote {len(spans)} spans to {file}; open it at ui.perfetto.dev")
    return 0


def _show(spans: Sequence[Record], others: int, *, whole: bool) -> None:
    console = Console(highlight=False)
    with console.capture() as page:
        for line in _about(spans, others):
            console.print(line, soft_wrap=True)
        for line in lines(nodes_of(spans, collapse=not whole), console.width):
            console.print(line, soft_wrap=True)
    print(page.get(), end="")  # rich would end with 1 where nobody reads to the end


def _about(spans: Sequence[Record], others: int) -> list[Text]:
    """Return what is known of the request as a whole."""
    facts = {name: value for span in reversed(spans) for name, value in span.attributes.items()}
    said = {
        "request": facts.get("expertmesh.request_id"),
        "tenant": facts.get("expertmesh.tenant"),
        "model": facts.get("gen_ai.request.model"),
        "status": facts.get("http.response.status_code"),
        "prompt tokens": facts.get("gen_ai.usage.input_tokens"),
        "tokens": facts.get("gen_ai.usage.output_tokens"),
    }
    known = "  ".join(f"{name} {value}" for name, value in said.items() if value is not None)
    found = [Text(f"trace {spans[0].trace_id}  {known}", style="bold")]
    if others:
        found.append(Text(f"{others} older requests have this id, too; a trace's id names one of them", style="dim"))
    return [*found, Text("Beginning and length by the clock of each process", style="dim")]
