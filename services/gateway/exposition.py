"""One /metrics page for a whole server. In: this process's series and its siblings', in one format. Out: all with a
``role`` label, their own where they have one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from services.config import GATEWAY
from services.errors import ConfigError
from services.metrics import TEXT, UPSTREAM_UP, UPSTREAM_UP_TEXT, PageFormat

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_OWN_ROLE = re.compile(r'[{,]role="')
"""Prometheus refuses a whole page on which one series has a label twice."""


@dataclass(slots=True)
class _Family:
    """Samples of one metric, with its HELP and TYPE lines."""

    comments: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def _label(sample: str, labels: str) -> str:
    """Returns ``sample`` with ``labels`` put before its own; without the first, the role, if it has one of its own.

    >>> _label('up{a="b"} 1', 'role="x"')
    'up{role="x",a="b"} 1'
    >>> _label('wanted_replicas{role="experts"} 2', 'role="scheduler"')
    'wanted_replicas{role="experts"} 2'
    >>> _label('build_info{role="attention"} 1', 'role="attention",instance="attention-1"')
    'build_info{instance="attention-1",role="attention"} 1'
    """
    if _OWN_ROLE.search(sample):
        labels = labels.partition(",")[2]
    if not labels:
        return sample
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space or space < 0:
        return f"{sample[: brace + 1]}{labels},{sample[brace + 1 :]}"
    return f"{sample[:space]}{{{labels}}}{sample[space:]}"


def merge(pages: Iterable[tuple[str, str]], form: PageFormat = TEXT) -> str:
    """Merges (labels, page) pairs in ``form`` into one. A metric's samples stay together, as the formats demand."""
    families: dict[str, _Family] = {}
    for labels, page in pages:
        family = _Family()
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                family = families.setdefault(name, _Family())
                family.comments.setdefault(kind, line)
            elif line and not line.startswith("#"):
                family.samples.append(_label(line, labels))
    lines = (line for family in families.values() for line in (*family.comments.values(), *family.samples))
    return "\n".join(lines) + "\n" + form.end


@dataclass(frozen=True, slots=True)
class Upstream:
    """A sibling process. Several of one role carry an ``instance`` label as well."""

    labels: str
    url: str


def parse_upstreams(entries: Sequence[str]) -> list[Upstream]:
    """Parses siblings from ``role=url`` entries. Raises ConfigError for anything else."""
    pairs = [entry.partition("=")[::2] for entry in entries]
    if any(not role or not url for role, url in pairs):
        raise ConfigError(
            "metrics_upstreams must be role=url entries.", hint="Such as attention=http://127.0.0.1:9000."
        )
    roles = [role for role, _ in pairs]
    found = []
    for index, (role, url) in enumerate(pairs):
        labels = f'role="{role}"'
        if roles.count(role) > 1:
            labels += f',instance="{role}-{roles[:index].count(role)}"'
        found.append(Upstream(labels, url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"))
    return found


class Siblings:
    """Fetches and merges the siblings' pages. A sibling that does not answer is left out and shown as down. ``role`` is
    the role of this process."""

    def __init__(self, upstreams: Sequence[Upstream], *, role: str = GATEWAY, timeout_s: float = _TIMEOUT_S) -> None:
        self._upstreams = tuple(upstreams)
        self._own = f'role="{role}"'
        self._client = httpx.AsyncClient(timeout=timeout_s, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def page(self, own: str, form: PageFormat = TEXT) -> str:
        """Returns ``own``, which is in ``form``, and the siblings' series on one page; ``own`` as it is where there are
        no siblings."""
        if not self._upstreams:
            return own
        pages = await asyncio.gather(*(self._fetch(upstream, form) for upstream in self._upstreams))
        up = [
            f"# HELP {UPSTREAM_UP} {UPSTREAM_UP_TEXT}",
            f"# TYPE {UPSTREAM_UP} gauge",
        ]
        merged = [(self._own, own)]
        for upstream, page in zip(self._upstreams, pages, strict=True):
            merged.append((upstream.labels, page or ""))
            merged.append((upstream.labels, "\n".join([*up, f"{UPSTREAM_UP} {int(page is not None)}"])))
        return merge(merged, form)

    async def _fetch(self, upstream: Upstream, form: PageFormat) -> str | None:
        """Returns the page in ``form``; None: the process does not answer, or not in this format."""
        try:
            answer = await self._client.get(upstream.url, headers={"accept": form.content_type})
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            log.debug("no metrics from %s: %s", upstream.url, error)
            return None
        if form is not TEXT and not answer.headers.get("content-type", "").startswith(form.media_type):
            log.debug("metrics of %s are in another format", upstream.url)
            return None
        return answer.text
