"""schemathesis over the server's own OpenAPI document: no 500, no undocumented status."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.processes.servers import Server, bench


@pytest.fixture(scope="module")
def short(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: a valid body without max_tokens draws as many as the context has room for."""
    with bench(tmp_path_factory.mktemp("short")) as stage:
        yield stage.serve(tiny, served_model_name="tiny", dtype="float32", kv_blocks=512, max_model_len=64)


@pytest.mark.parametrize(("each", "least"), [(60, 500), pytest.param(150, 1000, marks=pytest.mark.night)])
def test_examples_meet_no_500_and_no_undocumented_status(short: Server, tmp_path: Path, each: int, least: int) -> None:
    """``each``: most examples of one operation."""
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{short.url}/openapi.json"),
        *(
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ),
        *("--phases", "examples,coverage,fuzzing"),
        *("--max-examples", str(each), "--continue-on-failure", "--seed", "20", "--no-color"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    output = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0, output
    generated = re.search(r"(\d+) generated", result.stdout)
    assert generated, output
    assert int(generated[1]) >= least, output
