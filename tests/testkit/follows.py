"""The files whose change can turn a file of tests red.

They are found by reading, without running anything: what the file imports and what those files import, and what their
strings name, as a module (``"services.cli"`` of a command line) or as a path (``"helm/expertmesh"``). With a module
come the files next to it that are not Python, as scripts of Redis are. What only a type checker imports does not count.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

PACKAGES = ("", "kernels", "tests", "examples/pocket-moe")
"""Folders in which modules are found, from the root of the repository."""

PRODUCT = ("services/", "kernels/moe_kernels/")
"""Paths that its strings name are pages of the documentation, for readers."""

ROOT_CONFTEST = "tests/conftest.py"
NOT_FOLLOWED = frozenset(
    {".", ROOT_CONFTEST}
    | {f"tests/{name}" for name in ("expected_skips.toml", "gpu_results.json", "lanes.toml")}
    | {f"tests/testkit/{name}.py" for name in ("follows", "lanes", "results")}
)
"""The root's ``conftest.py`` is followed by all tests (tests/lanes.toml). What chooses and judges tests changes none of
them; its own tests are in every run."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?")
_FUNCTION = re.compile(r"^(?:async )?def (\w+)", re.M)
_FOR_ALL = re.compile(r"autouse=True|^def pytest_(?!addoption|configure)", re.M)
"""A ``conftest.py`` that changes every test below it."""


class Sources:
    """The files of a repository, given by their names from its root, and what follows from which."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        self._root = root
        self._names = frozenset(names)
        self._folders = frozenset(str(parent) for name in self._names for parent in Path(name).parents)
        self._beside: dict[str, list[str]] = {}
        self._scripts: dict[str, list[str]] = {}
        """Of folders outside of packages: what is in one may be run by a name that is put together."""
        packages = {Path(name).parent for name in self._names if name.endswith(".py")} | {Path(".")}
        for name in self._names:
            folder = str(Path(name).parent)
            if name.endswith(".py") and f"{folder}/__init__.py" not in self._names:
                self._scripts.setdefault(folder, []).append(name)
            if not name.endswith(".py"):
                package = next(parent for parent in Path(name).parents if parent in packages)
                self._beside.setdefault(str(package), []).append(name)

    @functools.cache  # noqa: B019  # as long as a run
    def followed_by(self, test: str) -> frozenset[str]:
        """Return files and folders: the test's own file, the ``conftest.py`` above it, and what follows from them.

        What a ``conftest.py`` imports counts where one of its fixtures is asked for by name, or by all tests.
        """
        found: set[str] = set()
        above = [name for parent in Path(test).parents if (name := str(parent / "conftest.py")) in self._names]
        self._add(test, found)
        while used := [name for name in above if name not in found and self._is_used(name, found)]:
            for name in used:
                self._add(name, found)
        return frozenset(found.union(above))

    def _add(self, name: str, found: set[str]) -> None:
        """Add the file, and what follows from it."""
        left = [name]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                if name.endswith(".py") and name in self._names:
                    left += self._named_in(name)

    def _is_used(self, conftest: str, found: Iterable[str]) -> bool:
        text = self._text(conftest)
        asked_for = re.compile(rf"\b(?:{'|'.join(_FUNCTION.findall(text))})\b")
        return (bool(_FOR_ALL.search(text)) and conftest != ROOT_CONFTEST) or any(
            asked_for.search(self._text(name)) for name in found if name.startswith("tests/") and name.endswith(".py")
        )

    @functools.cache  # noqa: B019
    def _text(self, name: str) -> str:
        path = self._root / name
        return path.read_text() if path.is_file() else ""

    @functools.cache  # noqa: B019
    def _named_in(self, name: str) -> frozenset[str]:
        words = set(_words(ast.parse(self._text(name))))
        named = {found for word in words for found in self._modules(word)}
        if not name.startswith(PRODUCT):
            paths = {word.rstrip("/") for word in words if "/" in word}
            paths |= {str(Path(name).parent / path) for path in paths}  # from the file's own folder
            named |= paths & (self._names | self._folders)
            named |= {file for folder in named & self._folders for file in self._scripts.get(folder, ())}
            named |= {str(Path(name).with_name(word)) for word in words if word and "/" not in word} & self._names
        folder = str(Path(name).parent)
        return frozenset({*named, *(self._beside.get(folder, ()) if folder != "." else ())}) - NOT_FOLLOWED

    def _modules(self, word: str) -> Iterator[str]:
        """The modules and packages along a dotted name, whose last parts may be no module."""
        parts = word.split(".")
        if all(part.isidentifier() for part in parts):
            for end in range(1, len(parts) + 1):
                yield from self._module("/".join(parts[:end]))

    @functools.cache  # noqa: B019
    def _module(self, path: str) -> tuple[str, ...]:
        places = (f"{package}/{path}".removeprefix("/") for package in PACKAGES)
        return tuple(
            name for place in places for name in (f"{place}.py", f"{place}/__init__.py") if name in self._names
        )


def _words(tree: ast.Module) -> Iterator[str]:
    """What is imported, what is run by ``-m``, and what strings say; not those of docstrings."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                left += node.orelse
                continue
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.BinOp(op=ast.Div()) if joined := _joined(node):
                yield f"{joined}/"
                continue
            case ast.List() | ast.Tuple():
                yield from _run_as_modules(node.elts)
            case ast.Constant(value=str(text)):
                yield from _DOTTED.findall(text)
                yield from _PATH.findall(text)
        left += ast.iter_child_nodes(node)


def _joined(node: ast.expr) -> str:
    """``x / "helm" / "images"`` names helm/images, whatever x is."""
    match node:
        case ast.BinOp(op=ast.Div(), left=left, right=ast.Constant(value=str(text))):
            return f"{_joined(left)}/{text}".removeprefix("/")
    return ""


def _run_as_modules(words: Sequence[ast.expr]) -> Iterator[str]:
    texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
    yield from (
        f"{module}.__main__" for option, module in pairwise(texts) if option == "-m" and isinstance(module, str)
    )
