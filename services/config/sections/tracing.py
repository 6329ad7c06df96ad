"""Section: distributed traces, which are off unless one of these is set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, GATEWAY, setting

DEFAULT_SAMPLE = 0.01
"""Share of requests that are traced where tracing is on and no share is given."""
_COLLECTOR = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables for the address of a collector."""


class TracingSettings(BaseModel):
    """Whether requests are traced, which of them, and where their spans go."""

    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP, such as http://collector:4318) that gets the traces of "
        "requests; OTEL_EXPORTER_OTLP_* and OTEL_RESOURCE_ATTRIBUTES are read, too",
        pattern=r"^https?://.+",
    )
    trace_sample: float | None = setting(
        None,
        "share of requests that are traced, from 0 to 1; a request that brings a `traceparent` decides for itself, see "
        f"--trace-client-rate (default: {DEFAULT_SAMPLE} if traces go anywhere)",
        common=True,
        ge=0,
        le=1,
    )
    trace_client_rate: float = setting(
        1.0,
        "requests per second that a gateway traces because their `traceparent` says so, ten seconds' worth of them at "
        "once; of those beyond it the share --trace-sample is traced. 0: clients cannot have themselves traced",
        roles=(GATEWAY,),
        ge=0,
        le=1_000_000,
    )
    trace_folder: Path | None = setting(
        None,
        "folder for traces in files, for `expertmesh trace` (default: a folder of `serve`'s own that ends with it, if "
        "--trace-sample is given and no collector is)",
    )
    trace_steps: Literal["auto", "on", "off"] = setting(
        "auto",
        "trace every step of the engine, too, not only sampled requests; auto does so in the files of --trace-folder",
        roles=(ATTENTION,),
    )

    @property
    def traces_wanted(self) -> bool:
        """Whether requests are to be traced at all."""
        given = (self.otlp_endpoint, self.trace_sample, self.trace_folder)
        return any(value is not None for value in given) or self.trace_steps == "on"

    @property
    def traces_have_a_place(self) -> bool:
        """Whether it is known where traces go: to a collector, or into a folder."""
        return self.trace_folder is not None or self.otlp_endpoint is not None or any(map(os.environ.get, _COLLECTOR))

    @property
    def traced_share(self) -> float:
        """The share of requests that are traced unless their clients say otherwise."""
        return DEFAULT_SAMPLE if self.trace_sample is None else self.trace_sample
