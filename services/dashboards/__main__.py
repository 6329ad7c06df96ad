"""``expertmesh dashboards``: the dashboards that come along, drawn from a Prometheus into a page of HTML."""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config import OptionParser
from services.dashboards.model import Dashboard
from services.dashboards.page import Board, Frame, page
from services.dashboards.prometheus import Prometheus
from services.dashboards.render import Look, board
from services.dashboards.shipped import chosen, shipped
from services.dashboards.times import seconds
from services.dashboards.variables import check_names
from services.errors import ConfigError, PrometheusUnavailable, QueryFailed

WATCH_S = 10.0
"""Seconds between two pages of --watch."""
_INDEX = "index.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where pages go: a file for all dashboards, or a folder with one for each."""

    path: Path

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir() or self.path.suffix.lower() not in (".html", ".htm")

    def write(self, boards: Sequence[Board], frame: Frame) -> list[Path]:
        """Write the pages and return their files.

        Raises:
            ConfigError: one cannot be written.
        """
        if not self.is_folder:
            return [_write(self.path, page(boards, frame))]
        files = {each.key: f"{each.key}.html" for each in boards}
        links = [(each.dashboard.short_title, files[each.key]) for each in boards]
        of_page = Frame(source=frame.source, span=frame.span, refresh_s=frame.refresh_s, links=links)
        written = [_write(self.path / files[each.key], page([each], of_page)) for each in boards]
        return written if len(boards) == 1 else [_write(self.path / _INDEX, page(boards, frame)), *written]


def _write(file: Path, text: str) -> Path:
    """Put ``text`` into ``file`` at once, so that no browser finds half of it."""
    half = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(text, encoding="utf-8")
        half.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror or error}).", hint="Name another file or folder by --out."
        ) from error
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or with --strict 1 where a panel has no data or a query failed.

    Raises:
        ConfigError: an option is wrong, or a file cannot be written.
        PrometheusUnavailable: no answer.
    """
    given = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    boards = shipped()
    if given.list:
        width = max(map(len, boards))
        print("\n".join(f"{key:<{width}}  {each.title}" for key, each in boards.items()))
        return 0
    if given.prometheus is None:
        raise ConfigError(
            "Which Prometheus?", hint="Give its address by --prometheus. On a laptop `expertmesh observe` starts one."
        )
    wanted, look = chosen(boards, given.dashboard), _look(given, boards)
    return asyncio.run(_run(wanted, look, given))


def _parser() -> OptionParser:
    parser = OptionParser(
        "expertmesh dashboards", "Draw the dashboards that come along from a Prometheus, into a page of HTML."
    )
    parser.add_argument("--prometheus", metavar="URL", help="Prometheus, such as http://127.0.0.1:9090")
    parser.add_argument("--from", dest="start", default="-1h", metavar="TIME", help="default: %(default)s")
    parser.add_argument("--to", dest="end", default="now", metavar="TIME", help="default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dashboards.html"),
        metavar="PATH",
        help="a file .html for all of them, or a folder with one each (default: %(default)s)",
    )
    parser.add_argument(
        "--dashboard", action="extend", nargs="+", default=[], metavar="NAME", help="which ones (default: all)"
    )
    parser.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable of the dashboards; several, if it may be given more than once",
    )
    parser.add_argument(
        "--scrape-interval", type=seconds, metavar="TIME", help="how often it scrapes (default: what it says, or 15s)"
    )
    parser.add_argument("--watch", action="store_true", help=f"write again every {WATCH_S:.0f} s until Ctrl-C")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a panel has no data or a query failed")
    parser.add_argument("--list", action="store_true", help="list the dashboards and exit")
    return parser


def _joined(words: Sequence[str]) -> list[str]:
    """Return ``words`` with ``--from -1h`` as one of them: argparse takes -1h for an option."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in ("--from", "--to") and word[:1] == "-" and word[1:2].isdigit():
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _look(given: Namespace, boards: Mapping[str, Dashboard]) -> Look:
    values: dict[str, list[str]] = {}
    for each in given.var:
        name, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"--var {each!r} has no value.", hint="Write it as in --var role=gateway.")
        values.setdefault(name, []).append(value)
    names = {variable.name: None for board_ in boards.values() for variable in board_.variables}
    check_names(values, [*names])
    look = Look(start=given.start, end=given.end, given=values, scrape_s=given.scrape_interval)
    look.span()
    return look


async def _run(wanted: Mapping[str, Dashboard], look: Look, given: Namespace) -> int:
    source, output = Prometheus(given.prometheus), Output(path=given.out)
    try:
        if not given.watch:
            return await _once(wanted, look, source, output, given)
        while True:
            began = time.monotonic()
            try:
                await _once(wanted, look, source, output, given)
            except (PrometheusUnavailable, QueryFailed) as error:  # it may come back: the last page stays
                print(error.message, file=sys.stderr)
            await asyncio.sleep(max(0.0, WATCH_S - (time.monotonic() - began)))
    finally:
        await source.aclose()


async def _once(
    wanted: Mapping[str, Dashboard], look: Look, source: Prometheus, output: Output, given: Namespace
) -> int:
    span = look.span()
    boards = [await board(source, key, each, look, span) for key, each in wanted.items()]
    frame = Frame(source=source.shown_url, span=span, refresh_s=WATCH_S if given.watch else None)
    return _report(boards, output.write(boards, frame), strict=given.strict)


def _report(boards: Sequence[Board], files: Sequence[Path], *, strict: bool) -> int:
    """Say what was written and which panels are empty, and return the exit code."""
    count = sum(len(each.drawings) for each in boards)
    print(f"{files[0]}: {count} panels of {len(boards)} dashboards", flush=True)
    wrong = [f"{each.key}: {title}: no data" for each in boards for title in each.without_data()]
    wrong += [f"{each.key}: {fault}" for each in boards for fault in each.faulty()]
    for line in wrong:
        print(f"  {line}", file=sys.stderr)
    return 1 if strict and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
