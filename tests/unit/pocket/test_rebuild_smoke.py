"""``rebuild.sh --smoke`` with its real scripts: from packages to an exported model, on the CPU, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from testkit.pocket.evidence import EXAMPLE, ROOT
from testkit.pocket.packages import write_packages
from testkit.pocket.training import curve

from pocket_moe.model import export

SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "el", "is", "or", "um")]


def write_glossaries(unpacked: Path, files: int = 40) -> None:
    """Pages with so many made-up words that they make a tokenizer of full size."""
    random = Random(0)
    for number in range(files):
        words = ["".join(random.choices(SYLLABLES, k=4)) for _ in range(200)]
        page = unpacked / f"sea-doc/usr/share/doc/sea-doc/html/glossary-{number}.html"
        page.write_text(f"<title>{number}</title><div role=main><h1>Words</h1><p>{' '.join(words)}.</p></div>")


def test_a_smoke_run_makes_a_model_from_packages(tmp_path: Path) -> None:
    sources = write_packages(tmp_path)
    write_glossaries(tmp_path / "unpacked")
    no_network = tmp_path / "bin/apt-get"
    no_network.parent.mkdir()
    no_network.write_text("#!/bin/sh\nexit 1\n")
    no_network.chmod(0o755)
    paths = {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    paths |= {"PATH": f"{no_network.parent}:{os.environ['PATH']}"}
    command = ["bash", EXAMPLE / "rebuild.sh", "--smoke", "--work", tmp_path, "--sources", sources]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = curve(tmp_path, "smoke")
    assert [line["step"] for line in lines] == ["5", "10", "15", "20"]
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"])
    meta = json.loads((tmp_path / "shards/meta.json").read_text())
    assert set(meta["domains"]) == {"dictionary", "manual", "pod"}
    assert export.load(tmp_path / "runs/smoke/model").config.vocab_size == meta["vocab_size"] == 8192
