"""What an engine is built from, looked for before anything is loaded: the model, and vLLM where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.options import Given
from services.bench.sides import Side
from services.bench.vllm import Vllm, find
from services.config import Settings
from services.errors import ConfigError
from services.model.hub import with_checkpoint
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec

if TYPE_CHECKING:
    from services.bench.ours import OurEngine


class Prepared:
    """The model of an engine, before its weights are read. ``vllm`` is there if it is to be compared with."""

    def __init__(self, given: Given, settings: Settings, spec: ModelSpec, vllm: Vllm | None) -> None:
        assert settings.model is not None
        self.settings, self.spec, self.vllm = settings, spec, vllm
        self.folder: Path = settings.model
        self.random = given.own.load_format == "dummy"
        self.name = str(given.settings.model)

    @classmethod
    def of(cls, given: Given) -> Prepared:
        """Looks for all that is needed. Raises ExpertMeshError: something is not there."""
        vllm = find(given.own.vllm, given.own.vllm_options) if given.own.against else None
        if given.settings.layout != "local":
            raise ConfigError(
                f"An engine in this process has its experts here, not --layout {given.settings.layout}.",
                hint="Use `expertmesh bench serve` for other layouts.",
            )
        check_model(given.settings)
        settings = with_checkpoint(given.settings, weights=given.own.load_format != "dummy")
        folder = settings.model
        assert folder is not None
        if "--prefix-cache" not in given.words:  # the same prompts come in each round
            settings = settings.model_copy(update={"prefix_cache": False})
        return cls(given, settings, load_spec(folder), vllm)

    @property
    def longest(self) -> int:
        """Tokens that a sequence may surely not exceed."""
        return min(self.settings.max_model_len or self.spec.max_position, self.spec.max_position)

    def ours(self) -> OurEngine:
        from services.bench.ours import start
        from services.model.weight_source import FromCheckpoint, RandomWeights

        return start(self.settings, RandomWeights() if self.random else FromCheckpoint())

    def theirs(self, vllm: Vllm, ours: Mapping[str, Any]) -> Side:
        """Returns vLLM's engine with the lengths, batch and type of ours."""
        from services.bench.vllm import start

        arguments: dict[str, Any] = {name: ours[name] for name in ("dtype", "max_num_seqs", "max_model_len")}
        arguments |= {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": self.settings.prefix_cache,
            "enforce_eager": self.settings.enforce_eager,
            "gpu_memory_utilization": self.settings.gpu_memory_utilization,
            "seed": 0,
        }
        if self.random:
            arguments["load_format"] = "dummy"
        if self.settings.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.settings.max_num_batched_tokens
        return start(vllm, arguments)


def check_model(settings: Settings) -> None:
    """Raises ConfigError: it is not said which model."""
    if settings.model is None:
        raise ConfigError("It is not said which model.", hint="Give a folder or an id of the hub, as for `serve`.")
