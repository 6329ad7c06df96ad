"""The formats of a page: Prometheus's text, and OpenMetrics for whoever asks for it. Only the latter has exemplars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFormat:
    """A format, by the name that it has in Accept and Content-Type. ``end`` is a page's last line."""

    content_type: str
    encode: Callable[[CollectorRegistry], bytes]
    end: str = ""

    @property
    def media_type(self) -> str:
        return self.content_type.partition(";")[0]


TEXT = PageFormat(content_type="text/plain; version=0.0.4; charset=utf-8", encode=generate_latest)
OPENMETRICS = PageFormat(
    content_type="application/openmetrics-text; version=1.0.0; charset=utf-8",
    encode=partial(
        openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8
    ),  # the default breaks names with a colon
    end="# EOF\n",
)


def format_for(accept: str) -> PageFormat:
    """Return the first format that the header ``accept`` names and that there is; else the text format."""
    _, content_type = choose_encoder(accept)
    return OPENMETRICS if content_type.startswith(OPENMETRICS.media_type) else TEXT
