"""``rebuild.sh`` with scripts that only note how they were called: order, restart, and what a failed claim does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from testkit.pocket.evidence import EXAMPLE

SCRIPTS = ["data", "train", "train", "speculate", "evaluate", "agree", "trace", "card"]
STUB = """#!/bin/sh
[ "$1" = -c ] && exit "${NO_VLLM:-0}"
echo "$@" >> calls
name=$(basename "$1" .py)
out=build/pocket-moe/runs/moe/model
case "$*" in *"--run moe"*) mkdir -p $out; echo weights > $out/model.safetensors;; esac
made=$(echo "$*" | sed -n 's/.*--root \\([^ ]*\\).*/\\1/p')
if [ -n "$made" ]; then
  (cd "$made" && mkdir -p speculators records plots && touch manifest.json MODEL_CARD.md records/new)
fi
case " $FAILING " in *" $name "*) exit "${STATUS:-1}";; esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the script alone, a python that notes its arguments, and a GPU."""
    (tmp_path / "examples/pocket-moe").mkdir(parents=True)
    shutil.copy(EXAMPLE / "rebuild.sh", tmp_path / "examples/pocket-moe/rebuild.sh")
    (tmp_path / "bin").mkdir()
    for name, text in {"python": STUB, "nvidia-smi": "#!/bin/sh\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def rebuild(root: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The finished script, and the calls of its steps."""
    (root / "calls").unlink(missing_ok=True)
    paths = {"PYTHON": str(root / "bin/python"), "PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(root / "examples/pocket-moe/rebuild.sh"), *arguments]
    done = subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True, check=False)
    calls = (root / "calls").read_text().splitlines() if (root / "calls").is_file() else []
    return done, calls


def names(calls: list[str]) -> list[str]:
    return [Path(call.split()[0]).stem for call in calls]


def test_every_step_runs_in_order_and_a_run_with_a_checkpoint_goes_on(root: Path) -> None:
    done, calls = rebuild(root, FAILING="")
    assert (done.returncode, names(calls)) == (0, SCRIPTS)
    assert not any("--resume" in call for call in calls)
    (root / "build/pocket-moe/runs/moe/checkpoint.pt").touch()
    _, calls = rebuild(root, FAILING="")
    assert [call.endswith("--resume") for call in calls if "train.py" in call] == [True, False]


def test_a_smoke_run_ends_after_its_training(root: Path) -> None:
    done, calls = rebuild(root, "--smoke", FAILING="")
    assert (done.returncode, names(calls)) == (0, ["data", "train"])
    assert calls[1].endswith("--run smoke --smoke")


@pytest.mark.parametrize("wrong", ["--smok", "--work", "--sources", ""])
def test_an_unknown_argument_is_refused(root: Path, wrong: str) -> None:
    done, calls = rebuild(root, "--smoke", wrong, FAILING="")
    assert (done.returncode, calls) == (2, [])
    assert "usage: " in done.stderr
    assert f"there is no {wrong}, or" in done.stderr


def test_another_folder_and_another_list_reach_every_step(root: Path) -> None:
    work = os.path.relpath(root / "build/pocket-moe")  # of the caller's folder, not of the repository
    done, calls = rebuild(root, "--work", work, "--sources", str(root / "mine.toml"), FAILING="")
    assert (done.returncode, names(calls)) == (0, SCRIPTS)
    assert calls[0].endswith(f"--work {root}/build/pocket-moe --sources {root}/mine.toml")
    assert all(f"--work {root}/build/pocket-moe" in call for call in calls)


def test_a_new_model_clears_what_was_measured_of_the_old_one(root: Path) -> None:
    measured = [root / "examples/pocket-moe" / name for name in ("records/vllm.json", "speculators/0/w")]
    for file in measured:
        file.parent.mkdir(parents=True)
        file.touch()
    rebuild(root, FAILING="speculate")
    assert all(file.exists() for file in measured), "nothing is gone before the new ones are made"
    rebuild(root, FAILING="")
    assert (root / "examples/pocket-moe/model/model.safetensors").read_text() == "weights\n"
    assert (root / "examples/pocket-moe/records/new").exists()
    assert not (root / "build/pocket-moe/made").exists()
    assert not any(file.exists() for file in measured)
    measured[0].touch()
    rebuild(root, FAILING="")
    assert measured[0].exists(), "the same model keeps its records"


def test_a_failed_claim_is_reported_at_the_end(root: Path) -> None:
    done, calls = rebuild(root, FAILING="evaluate agree", STATUS="3")
    assert (done.returncode, names(calls)) == (3, SCRIPTS)
    assert "failed: evaluate.py agree.py" in done.stderr


def test_without_vllm_it_says_what_was_not_measured(root: Path) -> None:
    done, calls = rebuild(root, FAILING="", NO_VLLM="1")
    assert (done.returncode, names(calls)) == (0, [name for name in SCRIPTS if name != "agree"])
    assert "vLLM is not installed: agreement with it was not measured" in done.stderr
    assert "vLLM" not in rebuild(root, FAILING="")[0].stderr
    (root / "examples/pocket-moe/records/vllm.json").touch()
    assert "of an earlier run" in rebuild(root, FAILING="", NO_VLLM="1")[0].stderr


@pytest.mark.parametrize(
    ("failing", "status"), [("speculate", "1"), ("evaluate", "1"), ("agree", "1"), ("evaluate", "137")]
)
def test_anything_else_stops_it(root: Path, failing: str, status: str) -> None:
    done, calls = rebuild(root, FAILING=failing, STATUS=status)
    assert (done.returncode, names(calls)[-1]) == (int(status), failing)
