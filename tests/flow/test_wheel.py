"""What `make dist` builds, installed into an environment that has only what it asks for, away from the clone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from testkit.pocket.answers import POCKET, assert_recorded, complete_all, recorded
from testkit.processes.servers import START_TIMEOUT_S, bench, flags, free_port
from testkit.waiting import until

ROOT = Path(__file__).parents[2]
PACKAGES = {
    name: ROOT / folder
    for name, folder in (("services", "services"), ("moe_kernels", "kernels/moe_kernels"), ("loadgen", "loadgen"))
}
FILES = [f"helm/expertmesh/{folder}" for folder in ("dashboards", "rules")]
pytestmark = [
    pytest.mark.alone,
    pytest.mark.night(
        "pyproject.toml",
        "expertmesh",
        "loadgen",
        "services/demo",
        "services/errors.py",
        "services/ray",
        "services/supervisor",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is built from the source distribution, as by `make dist`."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], check=True)
    [built] = folder.glob("*.whl")
    return built


def environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Returns the programs of a new environment with the wheel, its extras, and others' packages of our names."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    [info] = site.glob("expertmesh-*.dist-info")
    link_needed(metadata.Distribution.at(info), extras, site)
    for name in PACKAGES:
        (site / f"{name}.py").write_text("raise AssertionError('of another distribution')")
    return programs


def link_needed(ours: metadata.Distribution, extras: tuple[str, ...], site: Path) -> None:
    """Links what ``ours`` requires from the environment of the tests, so that nothing is downloaded."""
    found: set[tuple[str, str]] = set()
    left = [(ours.name, extra) for extra in ("", *extras)]
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            name, extra = each
            requires = (ours if name == ours.name else metadata.distribution(name)).requires or ()
            for need in map(Requirement, requires):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    left += [(need.name, more) for more in ("", *need.extras)]
    for name in {name for name, _ in found} - {ours.name}:
        of_others = metadata.distribution(name)
        for top in {file.parts[0] for file in of_others.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(of_others.locate_file(top))))


def alone(home: Path) -> list[str]:
    """Words before a command that keep everything of the tests' environment from it."""
    return ["env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin", "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1"]


def test_it_has_one_name_and_every_file(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"expertmesh"}
    for package, folder in (PACKAGES | {folder: ROOT / folder for folder in FILES}).items():
        files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert {f"expertmesh/_packages/{package}/{file}" for file in files} <= names


def test_with_the_extra_serve_it_serves_the_model_that_it_brings(wheel: Path, tmp_path: Path) -> None:
    programs, port = environment(tmp_path / "env", wheel, "serve"), free_port()
    options = flags(port=port, served_model_name="pocket", dtype="float32", threads=1)
    wanted = recorded()[:5]
    with bench(tmp_path) as stage:
        demo = stage.start("demo", [*alone(tmp_path), str(programs / "expertmesh"), "demo", *options])
        until(
            lambda: "Try it yourself" in demo.log() or demo.popen.poll() is not None,
            "it has shown a completion",
            limit_s=START_TIMEOUT_S,
            every_s=0.1,
        )
        assert "(noun) A musician who plays the violin." in demo.log()
        assert_recorded(wanted, asyncio.run(complete_all(f"http://127.0.0.1:{port}", wanted)))
        assert demo.stop() == 0


def test_with_the_extra_ray_processes_on_a_cluster_find_what_it_brings(wheel: Path, tmp_path: Path) -> None:
    """Ray's workers look for modules in the folder of the command, too: it is not the clone."""
    pytest.importorskip("ray", reason="Ray has no wheel for this Python")
    programs, port = environment(tmp_path / "env", wheel, "serve", "ray"), free_port()
    options = flags(http_port=port, served_model_name="pocket", dtype="float32", threads=1, auth="off")
    wanted = recorded()[:5]
    with bench(tmp_path) as stage:
        away = ["env", "-C", str(tmp_path), *alone(tmp_path)]
        server = stage.start("ray", [*away, str(programs / "expertmesh"), "ray", "up", str(POCKET / "model"), *options])
        until(
            lambda: "expertmesh serves pocket" in server.log() or server.popen.poll() is not None,
            "it serves",
            limit_s=START_TIMEOUT_S,
            every_s=0.1,
        )
        assert_recorded(wanted, asyncio.run(complete_all(f"http://127.0.0.1:{port}", wanted)))
        assert server.stop() == 0


def test_with_the_extra_load_it_measures_a_server_and_draws_the_report(wheel: Path, tmp_path: Path) -> None:
    load, port = environment(tmp_path / "env", wheel, "load") / "expertmesh-load", free_port()
    with bench(tmp_path) as stage:
        stage.start("null", [*alone(tmp_path), str(load), "null", "--port", str(port)])
        words = ["--rate", "20", "--requests", "20", "--wait", "60", "--lag-limit", "60000ms"]
        files = {name: tmp_path / f"run.{name}" for name in ("out", "html", "junit")}
        options = [word for name, path in files.items() for word in (f"--{name}", path)]
        command = [*alone(tmp_path), load, "run", f"http://127.0.0.1:{port}", *words, *options]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.partition(":")[0]) == (0, "VALID"), ran
    assert "<style>" in files["html"].read_text(encoding="utf-8")
    assert files["junit"].stat().st_size


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("base") / "env", wheel)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["version"], 0, "expertmesh "),
        (["plan", "--help"], 0, "usage: expertmesh plan"),
        (["dashboards", "--list"], 0, "overview"),
        (["observe", "--help"], 0, "usage: expertmesh observe"),
        (["status", "--context", "there"], 1, "pip install 'expertmesh[kubernetes]'"),
        (["serve", POCKET / "model"], 2, "pip install 'expertmesh[worker]'"),
        (["experts", "--model", POCKET / "model"], 2, "pip install 'expertmesh[worker]'"),
    ],
)
def test_without_extras_it_says_which_one_is_needed(
    base: Path, tmp_path: Path, words: list[str | Path], code: int, says: str
) -> None:
    ran = subprocess.run([*alone(tmp_path), base / "expertmesh", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran
    assert says in ran.stdout + ran.stderr
