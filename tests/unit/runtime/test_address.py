"""Under which address a process is found."""

from __future__ import annotations

import socket

import pytest

from services.config import Settings
from services.runtime import advertised, scrape_url

NAME = socket.gethostname()


@pytest.mark.parametrize(
    ("options", "host", "url"),
    [
        ({"host": "10.0.0.7"}, "10.0.0.7", "http://10.0.0.7:9100/metrics"),
        ({"host": "fd00::7"}, "fd00::7", "http://[fd00::7]:9100/metrics"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.7"}, "10.0.0.7", "http://10.0.0.7:9100/metrics"),
        ({"host": "::", "advertise": "pod-0.pods"}, "pod-0.pods", "http://pod-0.pods:9100/metrics"),
        *(({"host": every}, NAME, f"http://{NAME}:9100/metrics") for every in ("0.0.0.0", "::")),
    ],
)
def test_what_is_advertised_is_where_others_come(options: dict[str, str], host: str, url: str) -> None:
    settings = Settings(**options)
    assert advertised(settings) == host
    assert scrape_url(settings, 9100) == url
