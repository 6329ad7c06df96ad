"""The MoE layers that are measured. d: hidden size, f: expert width, E: experts, k: chosen per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

ROWS: Final = (1, 8, 32, 128, 512, 2048, 8192)
"""Tokens per call, from one stream's decode to a long prompt's prefill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One MoE layer. ``tuned``: its tiles were searched; the others show what an unknown model gets."""

    name: str
    title: str
    d: int
    f: int
    E: int
    k: int
    activation: str = "swiglu"
    tuned: bool = True

    @property
    def gated(self) -> bool:
        return self.activation.startswith("swiglu")

    @property
    def in_rows(self) -> int:
        """Output rows of the first matrix: gate and up, or up alone."""
        return 2 * self.f if self.gated else self.f

    @property
    def parameters(self) -> int:
        """Of one expert."""
        return (self.in_rows + self.f) * self.d

    def scaled(self, divisor: int) -> LayerShape:
        """The layer with both widths divided, in multiples of 128: its tiles' class in a fraction of the time."""
        d, f = (max(128, size // divisor // 128 * 128) for size in (self.d, self.f))
        return self if divisor == 1 else replace(self, name=f"{self.name}/{divisor}", d=d, f=f)


OAI: Final = "swiglu_oai"
_ALL = (
    LayerShape(name="mixtral", title="Mixtral-8x7B", d=4096, f=14336, E=8, k=2),
    LayerShape(name="qwen3-30b", title="Qwen3-30B-A3B", d=2048, f=768, E=128, k=8),
    LayerShape(name="olmoe", title="OLMoE-1B-7B", d=2048, f=1024, E=64, k=8),
    LayerShape(name="scattermoe", title="ScatterMoE unit", d=4096, f=2048, E=32, k=4, activation="gelu"),
    LayerShape(name="expertflow", title="ExpertFlow GPT", d=1024, f=4096, E=64, k=1, activation="gelu"),
    LayerShape(name="deepseek-v3", title="DeepSeek-V3", d=7168, f=2048, E=256, k=8),
    LayerShape(name="ds-1.3b-moe128", title="DeepSpeed 1.3B+MoE-128", d=2048, f=8192, E=128, k=1, activation="gelu"),
    LayerShape(name="glm-4.5-air", title="GLM-4.5-Air (untuned)", d=4096, f=1408, E=128, k=8, tuned=False),
    LayerShape(name="gpt-oss-20b", title="gpt-oss-20b", d=2880, f=2880, E=32, k=4, activation=OAI, tuned=False),
    LayerShape(name="tiny", title="tiny", d=128, f=128, E=8, k=2, tuned=False),
)
SHAPES: Final = {shape.name: shape for shape in _ALL}
"""By name. "tiny" runs anywhere in a second: for tests of the bench itself."""


def find(name: str) -> LayerShape:
    """A shape by name; ``name/divisor`` is its :meth:`LayerShape.scaled`. Raises KeyError with the known names."""
    base, slash, divisor = name.partition("/")
    scale = int(divisor) if divisor.isdecimal() else 0 if slash else 1
    if base not in SHAPES or scale < 1:
        raise KeyError(f"no shape {name!r}; known: {', '.join(SHAPES)} (and NAME/DIVISOR, a divisor of at least 1)")
    return SHAPES[base].scaled(scale)
