"""`expertmesh demo-model DIR`: writes a small checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.config import OptionParser
from services.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Writes the checkpoint and says how to serve it."""
    parser = OptionParser(
        "expertmesh demo-model", "Write a small qwen3_moe checkpoint: random layers, a real tokenizer."
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder to write; must be empty or missing")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default=_DTYPES[0], help="type of the weights (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        from services.demo.checkpoint import make_demo_model
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing.", hint="Install `expertmesh[worker]`.") from error
    make_demo_model(arguments.directory, arguments.dtype)
    print(f"wrote {arguments.directory}; serve it with: expertmesh serve --model {arguments.directory}")
    return 0
