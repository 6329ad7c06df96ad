"""schemathesis over the server's own OpenAPI document: no 500, no undocumented status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from testkit.processes.servers import Server

EXAMPLES_PER_OPERATION = 150
MIN_EXAMPLES = 1000


def test_a_thousand_examples_meet_no_500_and_no_undocumented_status(server: Server, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"),
        *(
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ),
        *("--phases", "examples,coverage,fuzzing"),
        *("--max-examples", str(EXAMPLES_PER_OPERATION), "--continue-on-failure", "--seed", "20", "--no-color"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    output = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0, output
    generated = re.search(r"(\d+) generated", result.stdout)
    assert generated, output
    assert int(generated[1]) >= MIN_EXAMPLES, output
