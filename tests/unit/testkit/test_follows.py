"""What a file of tests follows: by imports, by words of its strings, by fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.follows import Sources

FILES = {
    "services/__init__.py": "",
    "services/__main__.py": "import services.cli.main",
    "services/cli/__init__.py": "",
    "services/cli/main.py": 'ROLES = {"queue": "services.queue.role"}',
    "services/queue/__init__.py": "",
    "services/queue/role.py": "from __future__ import annotations\nfrom services import errors",
    "services/queue/lua/claim.lua": "",
    "services/errors.py": 'HINT = "see helm/chart/values.yaml"',
    "services/types.py": "",
    "kernels/moe/plan.py": "",
    "kernels/moe/tiles/default.json": "",
    "helm/chart/values.yaml": "",
    "helm/render.py": 'OUT = ROOT / "manifests"',
    "manifests/all.yaml": "",
    "README.md": "",
    "tests/conftest.py": "import services.cli.main\n@fixture(autouse=True)\ndef clean(): ...\ndef redis_url(): ...",
    "tests/unit/conftest.py": "import kit.redis\ndef redis(redis_url): ...",
    "tests/kit/redis.py": "",
    "tests/kit/__init__.py": "",
    "tests/unit/kernels/conftest.py": "import kit.poison\ndef pytest_runtest_call(item): ...",
    "tests/kit/poison.py": "",
    "tests/unit/peer.py": "",
    "tests/unit/fakes/role.py": "import services.errors",
}  # fmt: skip
CONFTESTS = {"tests/conftest.py", "tests/unit/conftest.py"}
QUEUE = {"services/__init__.py", "services/queue/__init__.py", "services/queue/role.py", "services/errors.py"}


def followed(tmp_path: Path, test: str, at: str = "tests/unit/test_x.py") -> set[str]:
    """What the test follows besides itself and the ``conftest.py`` above it."""
    for name, text in (FILES | {at: test}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = Sources(tmp_path, [*FILES, at]).followed_by(at)
    assert found >= CONFTESTS | {at}
    return set(found - CONFTESTS - {at})


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("import os, services.errors", {"services/__init__.py", "services/errors.py"}),
        ("def test():\n    from services.errors import Gone", {"services/__init__.py", "services/errors.py"}),
        ("from services.queue import role", QUEUE | {"services/queue/lua/claim.lua"}),
        ("from moe import plan", {"kernels/moe/plan.py", "kernels/moe/tiles/default.json"}),
        ("if TYPE_CHECKING:\n    import services.types\nelse:\n    import moe.plan", {
            "kernels/moe/plan.py", "kernels/moe/tiles/default.json",
        }),
        ('WORDS = f"-m services.queue.role {1}"', QUEUE | {"services/queue/lua/claim.lua"}),
        ('run([python, "-m", "services", "serve"])', QUEUE | {
            "services/__main__.py", "services/cli/__init__.py", "services/cli/main.py", "services/queue/lua/claim.lua",
        }),
        ('"""What services.queue.role does."""', set()),
        ('CHART = ROOT / "helm" / "chart"', {"helm/chart"}),
        ('CHART = ROOT / "helm/chart/values.yaml"', {"helm/chart/values.yaml"}),
        ('ALL = (ROOT / "services").rglob("*.py")', {"services"}),
        ('name = "services"', set()),
        ('run(ROOT / "helm" / name)', {"helm", "helm/render.py", "helm/chart/values.yaml", "manifests"}),
        ('run(Path(__file__).parent / "fakes" / name)', {
            "tests/unit/fakes", "tests/unit/fakes/role.py", "services/__init__.py", "services/errors.py",
        }),
        ('run(Path(__file__).with_name("peer.py"))', {"tests/unit/peer.py"}),
        ("def test(redis): ...", {"tests/kit/__init__.py", "tests/kit/redis.py", *QUEUE} | {
            "services/cli/__init__.py", "services/cli/main.py", "services/queue/lua/claim.lua",
        }),
    ],
)  # fmt: skip
def test_of(test: str, expected: set[str], tmp_path: Path) -> None:
    assert followed(tmp_path, test) == expected


def test_what_a_conftest_does_for_all_below_it_is_followed(tmp_path: Path) -> None:
    conftest = "tests/unit/kernels/conftest.py"
    found = followed(tmp_path, "", at="tests/unit/kernels/test_x.py")
    assert found == {conftest, "tests/kit/__init__.py", "tests/kit/poison.py"}
